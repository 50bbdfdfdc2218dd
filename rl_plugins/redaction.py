"""Text and options without secrets, for files, logs, error lines and MLflow.

Two forms of a secret are known: the user and the password in an address, and the value of a name such as `api_key`. An
expression such as `${oc.env:TOKEN}` is no secret: the value stays in the environment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

REMOVED = "***"
"""Text in place of a secret."""

# The tokens of a tokenizer, and numbers of tokens, are no secrets.
_NAME = (
    r"(?<!bos_|eos_|pad_|unk_|end_|top_)token(?![a-z0-9_])|secret|passw|passphrase|credential|authorization|"
    r"(?:api|access|private)[_-]?key"
)
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
# A password may contain a slash that should have been written as %2F. A number behind the colon is a port.
_USER_AND_PASSWORD = re.compile(r"(?<=://)(?:[^\s/:]*:(?!\d+/)[^\s\"']*@|[^\s/]*@)")
# A name with `=`, or a name in quotes or behind `{` or `,` with `:`. Expressions, true, false and null are no secrets.
_NAMED_VALUE = re.compile(
    rf"""([\w.+-]*(?:{_NAME})[\w-]*=|(?:["'][\w.-]*(?:{_NAME})[\w-]*["']|[{{,]\s*[\w.-]*(?:{_NAME})[\w-]*)\s*:\s*)"""
    r"""(?!["']?\$\{|(?:true|false|null|none)\b)(?:"[^"]*"|'[^']*'|[^\s"',;&)}\]]+)""",
    re.IGNORECASE,
)
# Quoted text of a name, or a line with a name and a value, as in a .env file. A variable in code is no secret.
_IN_CODE = re.compile(
    rf"""([\w.-]*(?:{_NAME})[\w-]*["']?\s*[:=]\s*)(?:"[^"\n]+"|'[^'\n]+')"""
    rf"""|(^[-+ ]?\s*(?:export\s+)?[\w.-]*(?:{_NAME})[\w-]*(?:=|:\s+))(?!["'])[^\s(),]+$""",
    re.IGNORECASE | re.MULTILINE,
)

SECRET_FILES = (
    ".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".git-credentials", ".pypirc", ".npmrc", ".htpasswd",
    "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key", "*.ppk", "*.p12", "*.pfx", "*.jks",
    "*.keystore", "*.kdbx", "credentials", "credentials.*", "secrets", "secrets.*", "auth_token", ".ssh", ".aws",
    ".azure", ".gcloud", ".gnupg", ".kube", ".docker",
)  # fmt: skip
"""Patterns for the names of files and folders with secrets, in small letters."""


def is_secret(name: str) -> bool:
    """Return True if the value of an option or a variable is a secret, judged by its name."""
    return _SECRET_NAME.search(name) is not None


def redacted(text: str) -> str:
    """Return a text without secrets: addresses without user and password, and `api_key=***`."""
    return _NAMED_VALUE.sub(rf"\g<1>{REMOVED}", without_password(text))


def without_password(text: str) -> str:
    """Return a text whose addresses have no user and no password."""
    return _USER_AND_PASSWORD.sub("", text)


def redacted_code(text: str) -> str:
    """Return source code or a diff without secrets: quoted values and lines `NAME=value`, and addresses."""
    return _IN_CODE.sub(lambda match: f"{match[1] or match[2]}{REMOVED}", without_password(text))


def redacted_value(value: object, name: str = "") -> Any:
    """Return the value of an option without secrets.

    Args:
        value: plain value: text, number, list or mapping. If the name of a mapping is the name of a secret, so are all
            values inside.
        name: name of the option.
    """
    if isinstance(value, dict):
        return {key: redacted_value(child, name if is_secret(name) else str(key)) for key, child in value.items()}
    if isinstance(value, list):
        return [redacted_value(item, name) for item in value]
    if value in (None, "", True, False) or "${" in str(value):
        return value
    if is_secret(name):
        return REMOVED
    return without_password(value) if isinstance(value, str) else value


def redacted_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without secrets: `key=value`, and words behind an option such as --api-key."""
    return [_redacted_word(word, before) for before, word in pairwise(["", *words])]


def _redacted_word(word: str, before: str) -> str:
    if before.startswith("--") and "=" not in before and is_secret(before):
        return REMOVED
    name, equals, value = word.partition("=")
    return redacted(f"{name}={redacted_value(value, name.rpartition('.')[2])}" if equals else word)
