"""A process that starts programs which would outlive the process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from multiprocessing.connection import Connection

DAEMON = "setsid sleep 1000000 > /dev/null & echo $!"


def serve(connection: Connection) -> None:
    """Obey orders until the end of the connection."""
    while True:
        order, argument = connection.recv()
        if order == "session":
            connection.send(subprocess.Popen(["sleep", "1000000"], start_new_session=True).pid)
        elif order == "daemon":
            connection.send(int(subprocess.check_output(["sh", "-c", DAEMON])))
        elif order == "status":
            connection.send(subprocess.run(["sh", "-c", f"exit {argument}"]).returncode)
        elif order == "stop":
            os.kill(argument, signal.SIGTERM)
            try:
                while True:
                    os.kill(argument, 0)
                    time.sleep(0.01)
            except ProcessLookupError:
                connection.send("gone")
        elif order == "exit":
            os._exit(argument)
        elif order == "raise":
            os.kill(os.getpid(), argument)
