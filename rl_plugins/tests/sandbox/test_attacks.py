"""Attacks on the sandbox: each is contained, leaves nothing behind, and does not disturb the next program."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from rl_plugins.sandbox.sandbox import CodeSandbox
from rl_plugins.tests.patience import TIME_SCALE, patient, wait_until
from rl_plugins.tests.sandbox.attacks import ATTACKS
from rl_plugins.tests.sandbox.machine import skip_without_namespaces

SECRET = "sandbox-secret"
_LIST = "import os\nprint(6 * 7, sorted(os.listdir('/tmp')))"


@pytest.fixture(scope="module")
def datagrams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Socket of this machine in a folder that programs see."""
    folder = tmp_path_factory.mktemp("visible")
    folder.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o777)
        yield folder / "socket"


@pytest.fixture(scope="module")
def sandbox(datagrams: Path) -> Iterator[CodeSandbox]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SANDBOX_TEST_KEY", SECRET)
        skip_without_namespaces()
        sandbox = CodeSandbox("namespaces", limits={"wall_s": patient(20)}, folders=[str(datagrams.parent)])
    with sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def listing(sandbox: CodeSandbox) -> str:
    """Print of a program about /tmp: a Python in /tmp, with its folders, is visible there."""
    printed = sandbox.run(_LIST).stdout
    assert "main.py" in printed
    return printed


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, datagrams: Path) -> Iterator[dict[str, object]]:
    """Places of this machine that attacks look for: sockets, a secret, and a process."""
    folder = tmp_path_factory.mktemp("places")
    folder.chmod(0o777)
    (folder / "secret").write_text(SECRET, encoding="utf-8")
    with ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        name = f"sandbox-test-{os.getpid()}"
        for address in (f"\0{name}", str(folder / "socket")):
            unix = stack.enter_context(socket.socket(socket.AF_UNIX))
            unix.bind(address)
            unix.listen()
        inherited = os.open(folder / "secret", os.O_RDONLY)
        stack.callback(os.close, inherited)
        os.set_inheritable(inherited, True)
        victim = stack.enter_context(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        yield {
            "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1],
            "name": name,
            "datagrams": datagrams,
            "folder": folder,
            "secret": folder / "secret",
            "home": Path.home(),
            "victim": victim.pid,
        }
        assert victim.poll() is None, "an attack ended a process outside"


def running_below(number: int) -> list[int]:
    """Return the numbers of the running processes below a process."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(path.parent.name))
    found, waiting = [], children.get(number, [])
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def mounts() -> str:
    return Path("/proc/self/mountinfo").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ATTACKS)
def test_sandbox_contains_the_attack(
    name: str, sandbox: CodeSandbox, listing: str, places: Mapping[str, object]
) -> None:
    attack, before, mounted = ATTACKS[name], set(running_below(os.getpid())), mounts()
    given = {key: value * TIME_SCALE if key == "wall_s" else value for key, value in attack.given.items()}
    result = sandbox.run(attack.program.format(**places), attack.stdin, limits=given)
    assert "ESCAPED" not in result.stdout, result.stdout
    assert result.limit in attack.limits, result
    assert result.limit or result.exit_status in attack.exit_statuses, result
    assert sandbox.run(_LIST).stdout == listing
    wait_until(lambda: set(running_below(os.getpid())) <= before, "the end of all processes of the attack")
    assert mounts() == mounted
