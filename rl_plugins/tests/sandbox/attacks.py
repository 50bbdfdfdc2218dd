"""Programs that attack their sandbox. A program prints ESCAPED if its attack succeeds."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

_CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def refused(name, *arguments):
    if getattr(libc, name)(*arguments) >= 0:
        print("ESCAPED", name)
"""
_CONNECT = """
import os, socket
def attempt(family, kind, address):
    try:
        peer = socket.socket(family, kind)
        peer.settimeout(2)
        peer.connect(address)
        peer.send(b"secret")
        print("ESCAPED", family, address)
    except OSError:
        pass
"""
_READ = """
import os
def attempt(path):
    try:
        print("ESCAPED", path, open(path, "rb").read(100))
    except OSError:
        pass
"""


@dataclass(frozen=True)
class Attack:
    """One attack.

    Attributes:
        program: text of the program. The words in braces are places and numbers of the machine.
        limits: allowed limits that end the program; empty for a program that ends by itself.
        exit_statuses: allowed exit statuses without a limit.
        given: limits of the sandbox.
        stdin: standard input.
    """

    program: str
    limits: tuple[str, ...] = ("",)
    exit_statuses: tuple[int, ...] = (0,)
    given: dict[str, float] = field(default_factory=dict)
    stdin: str = ""


ATTACKS = {
    # Too much of something.
    "endless loop": Attack("while True: pass", ("cpu",), given={"cpu_s": 0.3}),
    "endless loop with handlers": Attack(
        "import signal\nfor number in range(1, 32):\n    try: signal.signal(number, lambda *_: None)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        ("cpu",),
        given={"cpu_s": 0.3},
    ),
    "sleep": Attack("import time\ntime.sleep(100)", ("wall",), given={"wall_s": 0.3}),
    "stop of itself": Attack(
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", ("wall",), given={"wall_s": 0.5}
    ),
    "fork bomb": Attack(
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        ("cpu", "wall"),
        given={"cpu_s": 0.5, "wall_s": 2.0, "processes": 16},
    ),
    "children that hide their time": Attack(
        "import os, signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n"
        "    if os.fork() == 0:\n        for _ in range(10000): pass\n        os._exit(0)",
        ("cpu", "wall", ""),
        (1,),
        given={"cpu_s": 0.5, "wall_s": 2.0},
    ),
    "thread bomb": Attack(
        "import threading, time\ntry:\n    for count in range(1000):\n"
        "        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()\n    print('ESCAPED')\n"
        "except RuntimeError:\n    print('ESCAPED' if count > 32 else count)"
    ),
    "memory of one process": Attack(
        "data = []\nwhile True: data.append(bytearray(b'x') * 2**22)", ("memory",), given={"memory_mb": 128}
    ),
    "memory of many processes": Attack(
        "import os, time\nfor _ in range(3): os.fork()\ndata = b'x' * (60 * 2**20)\ntime.sleep(100)",
        ("memory",),
        given={"memory_mb": 200},
    ),
    # Without the refusal, the program keeps all pages, and the supervisor sees few.
    "shared memory without addresses": Attack(
        "import mmap\ntry:\n    data = mmap.mmap(-1, 2**28)\n    for start in range(0, 2**28, 2**22):\n"
        "        data[start : start + 2**22] = bytes(2**22)\n        data.madvise(mmap.MADV_DONTNEED, start, 2**22)\n"
        "    print('ESCAPED')\nexcept PermissionError:\n    pass",
        given={"memory_mb": 64},
    ),
    "shared memory of a device": Attack(
        "import mmap, os\ntry:\n    mmap.mmap(os.open('/dev/zero', os.O_RDWR), 2**22)\n    print('ESCAPED')\n"
        "except OSError:\n    print(len(open('/dev/zero', 'rb').read(10)))",
    ),
    "tables of pages": Attack(
        "import mmap\ndata = mmap.mmap(-1, 2**41, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)\n"
        "for place in range(0, 2**41, 2**21): data[place]",
        ("memory",),
        given={"memory_mb": 64},
    ),
    "disk": Attack(
        "try:\n    for number in range(100):\n        open(f'/tmp/{{number}}', 'wb').write(bytes(2**20))\n"
        "    print('ESCAPED')\nexcept OSError:\n    pass",
        given={"disk_mb": 8},
    ),
    "disk behind /dev/shm": Attack(
        "try:\n    for number in range(100):\n        open(f'/dev/shm/{{number}}', 'wb').write(bytes(2**20))\n"
        "    print('ESCAPED')\nexcept OSError:\n    pass",
        given={"disk_mb": 8},
    ),
    "many files": Attack(
        "try:\n    for number in range(20000): open(f'/tmp/{{number}}', 'w').close()\n    print('ESCAPED')\n"
        "except OSError:\n    pass",
    ),
    "long file": Attack(
        "try:\n    open('/tmp/long', 'wb').write(bytes(2**22))\n    print('ESCAPED')\nexcept OSError:\n    pass",
        given={"file_mb": 1},
    ),
    "endless output": Attack("while True: print('x' * 1000)", ("output",)),
    "endless errors": Attack("import sys\nwhile True: sys.stderr.write('x' * 1000)", ("output",)),
    "open files": Attack(
        "import os\ntry:\n    for count in range(1000): os.open('/dev/null', 0)\n    print('ESCAPED')\n"
        "except OSError:\n    print('ESCAPED' if count > 64 else count)"
    ),
    "inotify": Attack(
        _CALLS
        + "for count in range(60):\n    if libc.inotify_init() < 0: break\nprint('ESCAPED' if count > 8 else count)"
    ),
    "deep recursion": Attack("def f(): f()\nf()", exit_statuses=(1,)),
    "deep recursion without a limit": Attack(
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n"
        "    def __getattr__(self, name): return getattr(self, name)\nA().x",
        ("", "memory", "cpu", "wall"),
        (1, -signal.SIGSEGV),
    ),
    "standard input that nobody reads": Attack("pass", stdin="x" * 2**24),
    # Ends.
    "closed outputs": Attack("import os\nos.close(1)\nos.close(2)", exit_statuses=(0, 120)),
    "end by a signal": Attack(
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", exit_statuses=(-signal.SIGSEGV,)
    ),
    "end without goodbye": Attack("import os\nos._exit(7)", exit_statuses=(7,)),
    "hanging on close": Attack(
        "import atexit, time\natexit.register(time.sleep, 100)", ("wall",), given={"wall_s": 0.5}
    ),
    "child that keeps the output open": Attack(
        "import os, time\nif os.fork() == 0:\n    time.sleep(100)\n    print('ESCAPED')", given={"wall_s": 60}
    ),
    "daemon": Attack(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(100)\n"
        "    os._exit(0)",
        given={"wall_s": 60},
    ),
    # Network.
    "tcp": Attack(
        _CONNECT + "attempt(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', {tcp}))\n"
        "attempt(socket.AF_INET, socket.SOCK_STREAM, ('1.1.1.1', 80))"
    ),
    "udp": Attack(
        _CONNECT + "attempt(socket.AF_INET, socket.SOCK_DGRAM, ('127.0.0.1', {udp}))\n"
        "attempt(socket.AF_INET6, socket.SOCK_DGRAM, ('::1', {udp}))"
    ),
    "unix socket without a path": Attack(_CONNECT + "attempt(socket.AF_UNIX, socket.SOCK_STREAM, chr(0) + '{name}')"),
    "unix socket with a path": Attack(_CONNECT + "attempt(socket.AF_UNIX, socket.SOCK_STREAM, '{folder}/socket')"),
    "pairs of sockets": Attack(
        "import os, socket\nfor kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM):\n"
        "    for call in ('connect', 'bind', 'sendto', 'listen'):\n        try:\n"
        "            peer, _ = socket.socketpair(socket.AF_UNIX, kind)\n"
        "            address = '{datagrams}' if call != 'bind' else '/tmp/socket'\n"
        "            arguments = {{'sendto': (b'secret', address), 'listen': ()}}.get(call, (address,))\n"
        "            getattr(peer, call)(*arguments)\n            print('ESCAPED', kind, call)\n"
        "        except OSError:\n            pass"
    ),
    "raw sockets": Attack(
        _CONNECT + "for family, kind in ((socket.AF_INET, socket.SOCK_RAW), (socket.AF_PACKET, socket.SOCK_RAW), "
        "(socket.AF_NETLINK, socket.SOCK_RAW), (38, socket.SOCK_SEQPACKET)):\n    try:\n"
        "        socket.socket(family, kind)\n        print('ESCAPED', family)\n    except OSError:\n        pass"
    ),
    # Reading.
    "environment": Attack(
        "import glob, os\ntexts = [str(os.environ)]\nfor path in glob.glob('/proc/*/environ'):\n    try:\n"
        "        texts.append(open(path).read())\n    except OSError:\n        pass\n"
        "print('ESCAPED' if any('sandbox-secret' in text for text in texts) else 'nothing')"
    ),
    "home folder": Attack(_READ + "attempt('{home}/.bashrc')\nattempt('{home}/.profile')\nattempt('{secret}')"),
    "/etc/shadow": Attack(_READ + "attempt('/etc/shadow')\nattempt('/etc/hosts')\nattempt('/run/secrets/x')"),
    "/proc of other processes": Attack(
        _READ + "print([name for name in os.listdir('/proc') if name.isdigit()])\n"
        "if any(name.isdigit() and int(name) > 2 for name in os.listdir('/proc')): print('ESCAPED')\n"
        "for name in ('mem', 'maps', 'environ', 'fd/0', 'root/etc/shadow', 'cwd/x'): attempt(f'/proc/1/{{name}}')\n"
        "attempt('/proc/kcore')\nattempt('/proc/{victim}/cmdline')"
    ),
    "symbolic links": Attack(
        _READ
        + "for number, target in enumerate(('/etc/shadow', '{secret}', '/proc/1/root{secret}', '../..{secret}')):\n"
        "    os.symlink(target, f'/tmp/link{{number}}')\n    attempt(f'/tmp/link{{number}}')\n"
        "os.remove('/tmp/main.py')\nos.symlink('{secret}', '/tmp/main.py')\nattempt('/tmp/main.py')"
    ),
    "devices": Attack(
        _READ + "for name in ('mem', 'kmsg', 'vda', 'sda', 'tty', 'kvm', 'fuse'): attempt(f'/dev/{{name}}')\ntry:\n"
        "    os.mknod('/tmp/device', 0o20666, os.makedev(1, 1))\n    print('ESCAPED')\nexcept OSError:\n    pass"
    ),
    "inherited descriptors": Attack(
        "import os\nfor number in range(3, 1000):\n    try:\n        os.fstat(number)\n        print('ESCAPED', number)"
        "\n    except OSError:\n        pass"
    ),
    "memory of the server": Attack(
        "import gc, sys\ntexts = [value for value in gc.get_objects() if isinstance(value, dict)]\n"
        "print('ESCAPED' if any('sandbox-secret' in map(str, text.values()) for text in texts) else 'nothing')"
    ),
    # Changing.
    "writing outside": Attack(
        "import os, sys\nfor folder in ('/', '/usr', '/usr/bin', '/etc', '/dev', '/proc', '/proc/sys/kernel', "
        "sys.prefix, sys.base_prefix, '{folder}', '{home}'):\n    try:\n        open(folder + '/escaped', 'w')\n"
        "        print('ESCAPED', folder)\n    except OSError:\n        pass\n"
        "for path in ('/proc/sys/kernel/hostname', '/proc/sys/vm/drop_caches', '/proc/sysrq-trigger', "
        "'/proc/self/oom_score_adj', '/usr/bin/env', '/etc/passwd'):\n    try:\n        open(path, 'w')\n"
        "        print('ESCAPED', path)\n    except OSError:\n        pass"
    ),
    "signals": Attack(
        "import os, signal\nfor number in (os.getppid(), 1, {victim}):\n"
        "    for kind in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):\n"
        "        try: os.kill(number, kind)\n        except ProcessLookupError: pass\nprint('alive')\n"
        "try: os.kill(-1, 9)\nexcept ProcessLookupError: pass"
    ),
    "ptrace": Attack(
        _CALLS + "refused('ptrace', 0, 0, 0, 0)\nrefused('ptrace', 16, 1, 0, 0)\n"
        "refused('process_vm_readv', 1, 0, 0, 0, 0, 0)"
    ),
    "other users": Attack(
        _CALLS + "refused('setuid', 0)\nrefused('setgid', 0)\nrefused('setresuid', 65534, 65534, 65534)\n"
        "refused('setgroups', 0, 0)\nimport subprocess\n"
        "for command in (['su', '-c', 'id'], ['mount', '-t', 'tmpfs', 'x', '/tmp']):\n"
        "    try:\n        if subprocess.run(command, capture_output=True, timeout=60).returncode == 0:\n"
        "            print('ESCAPED', command)\n    except OSError:\n        pass"
    ),
    "mounts": Attack(
        _CALLS + "refused('mount', b'tmpfs', b'/tmp', b'tmpfs', 0, 0)\nrefused('umount2', b'/tmp', 2)\n"
        "refused('umount2', b'/proc', 2)\nrefused('chroot', b'/tmp')\nrefused('pivot_root', b'/tmp', b'/tmp')\n"
        "refused('mount', 0, b'/usr', 0, 4096 | 32, 0)"
    ),
    "new namespaces": Attack(
        _CALLS + "for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000): refused('unshare', flag)\n"
        "refused('setns', 0, 0)\nimport platform\nif platform.machine() == 'x86_64':\n"
        "    refused('syscall', 56, 0x10000000 | 17, 0, 0, 0, 0)\n    refused('syscall', 435, 0, 0)"
    ),
    "hidden memory and unusual calls": Attack(
        _CALLS + "refused('memfd_create', b'x', 0)\nrefused('shmget', 0, 4096, 0o1600)\nrefused('msgget', 0, 0o1600)\n"
        "for number in (425, 426, 427, 428, 429, 430, 442, 447): refused('syscall', number, 0, 0, 0, 0, 0)\n"
        "import platform\nif platform.machine() == 'x86_64':\n"
        "    for number in (248, 250, 298, 300, 321, 323, 0x40000000 + 41): refused('syscall', number, 0, 0, 0, 0, 0)"
    ),
    "higher limits": Attack(
        _CALLS + "import resource\nfor kind in range(16):\n    try:\n"
        "        soft, hard = resource.getrlimit(kind)\n        if hard != resource.RLIM_INFINITY:\n"
        "            resource.setrlimit(kind, (hard + 1, hard + 1))\n            print('ESCAPED', kind)\n"
        "    except (OSError, ValueError):\n        pass\n"
        "try:\n    resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))\n    print('ESCAPED')\nexcept OSError:\n    pass\n"
        "try:\n    os.nice(-1)\n    print('ESCAPED')\nexcept OSError:\n    pass"
    ),
    "clock and name of the machine": Attack(
        _CALLS + "import time\ntry:\n    time.clock_settime(time.CLOCK_REALTIME, 0)\n    print('ESCAPED')\n"
        "except OSError:\n    pass\nrefused('sethostname', b'x', 1)\nrefused('klogctl', 3, 0, 0)"
    ),
    "empty /tmp": Attack(
        "import os, shutil\nshutil.rmtree('/tmp', ignore_errors=True)\ntry:\n    os.rmdir('/tmp')\n"
        "    print('ESCAPED')\nexcept OSError:\n    print(os.listdir('/tmp'))"
    ),
    "another interpreter": Attack(
        'import subprocess, sys\ncode = \'import socket\\ntry:\\n    socket.socket()\\n    print("ESC" + "APED")\\n'
        'except OSError: pass\\nprint(open("/proc/self/status").read())\'\n'
        "text = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout\nprint(text)\n"
        "if 'NoNewPrivs:\\t1' not in text or 'CapEff:\\t0000000000000000' not in text: print('ESCAPED')"
    ),
}
