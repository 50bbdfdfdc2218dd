"""Connections of ranks to an engine: the engine accepts each rank of the run once, and no other process."""

from __future__ import annotations

import secrets
import socket
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl_plugins.connections import SECRET_BYTES, RankListener, connect_to_engine
from rl_plugins.errors import DeadlineExceeded
from rl_plugins.tests.other_user import OTHER_USER, needs_root, run_as_other_user, start_as_other_user
from rl_plugins.tests.patience import patient

DEADLINE_S = patient(30)
SECRET = secrets.token_bytes(SECRET_BYTES)
RANKS = 2

# Finds a socket by its prefix, as any user can, sends a greeting, and prints the number of bytes of the answer.
CONNECT = """
prefix, greeting = sys.argv[1], bytes.fromhex(sys.argv[2])
(name,) = {line.split("@")[1].strip() for line in open("/proc/net/unix") if "@" + prefix in line}
connection = socket.socket(socket.AF_UNIX)
connection.connect("\\0" + name)
try:
    connection.sendall(greeting)
    print(len(connection.recv(1000)))
except (BrokenPipeError, ConnectionResetError):
    print(0)
"""
LISTEN = """
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0" + sys.argv[1])
listener.listen()
print("listens", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def name() -> str:
    return f"rank-connections-{uuid.uuid4().hex}"


@pytest.fixture
def listener(name: str) -> Iterator[RankListener]:
    listener = RankListener(name, SECRET, RANKS)
    yield listener
    listener.close()


def greet(name: str, greeting: bytes) -> socket.socket:
    """Return a connection that has sent a greeting."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(DEADLINE_S)
    connection.connect(f"\0{name}")
    connection.sendall(greeting)
    return connection


def is_closed_by_peer(connection: socket.socket) -> bool:
    """Wait until the other side closes a connection; return False if it sends a byte instead.

    The kernel reports a reset where the listener was closed before it accepted the connection or read the greeting.
    """
    try:
        return connection.recv(10) == b""
    except ConnectionResetError:
        return True


def assert_all_ranks_connect(name: str, listener: RankListener) -> None:
    sides = [connect_to_engine(name, SECRET, rank, DEADLINE_S) for rank in range(RANKS)]
    accepted = listener.wait(DEADLINE_S)
    assert list(accepted) == list(range(RANKS))
    for rank, side in enumerate(sides):
        accepted[rank].sendall(bytes([rank]))
        assert side.recv(10) == bytes([rank])
        side.close()


@needs_root
def test_listener_drops_a_process_of_another_user_that_knows_the_secret(name: str, listener: RankListener) -> None:
    assert run_as_other_user(CONNECT, name, (SECRET + bytes(8)).hex()) == "0\n"
    assert_all_ranks_connect(name, listener)


@needs_root
def test_connect_to_engine_raises_for_a_socket_of_another_user(name: str) -> None:
    with start_as_other_user(LISTEN, name) as squatter:
        assert squatter.stdout is not None
        assert squatter.stdout.readline() == "listens\n"
        with pytest.raises(ConnectionError, match=f"{name} of a rollout engine belongs to user {OTHER_USER}"):
            connect_to_engine(name, SECRET, 0, DEADLINE_S)
        squatter.communicate()


@pytest.mark.parametrize(
    "greeting",
    [
        bytes(SECRET_BYTES) + bytes(8),
        SECRET[:-1] + bytes([SECRET[-1] ^ 1]) + bytes(8),
        SECRET,
        bytes(8),
        SECRET + RANKS.to_bytes(8),
        SECRET + (2**63 - 1).to_bytes(8),
    ],
    ids=["no secret", "wrong secret", "no rank", "old greeting", "rank too large", "huge rank"],
)
def test_listener_drops_only_the_connection_with_a_wrong_greeting(
    greeting: bytes, name: str, listener: RankListener
) -> None:
    wrong = greet(name, greeting)
    assert is_closed_by_peer(wrong)
    assert_all_ranks_connect(name, listener)


def test_listener_drops_the_second_connection_of_a_rank(name: str, listener: RankListener) -> None:
    first = greet(name, SECRET + bytes(8))
    second = greet(name, SECRET + bytes(8))
    assert is_closed_by_peer(second)
    other = greet(name, SECRET + (1).to_bytes(8))
    listener.wait(DEADLINE_S)[0].sendall(b"first")
    assert first.recv(10) == b"first"
    other.close()


def test_silent_connections_delay_no_rank(name: str, listener: RankListener) -> None:
    silent = [greet(name, b"") for _ in range(100)]
    assert_all_ranks_connect(name, listener)
    assert all(is_closed_by_peer(connection) for connection in silent)


def test_listener_ends_after_the_last_rank(name: str, listener: RankListener) -> None:
    assert_all_ranks_connect(name, listener)
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        greet(name, SECRET + bytes(8))


def test_close_ends_a_listener_without_ranks(name: str) -> None:
    listener = RankListener(name, SECRET, RANKS)
    silent, rank = greet(name, b""), connect_to_engine(name, SECRET, 0, DEADLINE_S)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(listener.close).result(timeout=DEADLINE_S)
    assert is_closed_by_peer(silent)
    assert is_closed_by_peer(rank)
    with pytest.raises(ConnectionRefusedError):
        greet(name, SECRET + bytes(8))


def test_connect_to_engine_raises_deadline_exceeded_if_the_queue_stays_full(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as full:
        full.bind(f"\0{name}")
        full.listen(0)
        waiting = greet(name, b"")
        with pytest.raises(DeadlineExceeded, match="rank 1 waited 0 s to connect"):
            connect_to_engine(name, SECRET, 1, 0.05)
        waiting.close()
