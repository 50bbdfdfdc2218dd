#!/bin/sh
# Says which system tools the installation lacks and how to get them, before anything is downloaded.
# Usage: check_system.sh PYTHON
python=$1
missing=0
lacks() {
    missing=$((missing + 1))
    printf 'missing: %s\n   get it: %s\n' "$1" "$2" >&2
}

if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
    lacks "Linux on x86_64 (this is $(uname -s) on $(uname -m))" \
        "requirements/cpu.lock.txt is for Linux x86_64; elsewhere try: pip install -e '.[cpu,dev]'"
fi
if ! command -v "$python" >/dev/null 2>&1; then
    lacks "$python" "Debian, Ubuntu: apt install python3.11 python3.11-venv python3.11-dev; or pyenv install 3.11; \
or name another one: make PYTHON=/path/to/python3.11 ..."
elif ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
    lacks "Python 3.11 ($python is $("$python" --version 2>&1))" \
        "name a Python 3.11: make PYTHON=/path/to/python3.11 ..."
else
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        lacks "the venv module of $python" "Debian, Ubuntu: apt install python3.11-venv"
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        lacks "the C headers of $python (DeepSpeed builds an extension)" "Debian, Ubuntu: apt install python3.11-dev"
fi
command -v "${CXX:-c++}" >/dev/null 2>&1 ||
    lacks "a C++ compiler, ${CXX:-c++} (DeepSpeed builds an extension)" \
        "Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++"
free_kib=$(df -Pk . | awk 'NR == 2 { print $4 }')
[ "$free_kib" -ge 8388608 ] ||
    lacks "8 GiB of free disk ($((free_kib / 1048576)) GiB are left here)" "make room, or move this checkout"

[ "$missing" -eq 0 ] || {
    printf '%s requirement(s) missing; nothing was installed.\n' "$missing" >&2
    exit 1
}
