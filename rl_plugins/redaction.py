"""Text and options without secrets, for files, logs, error lines and MLflow.

Four forms of a secret are known: the user and the password in an address, the signature in the query of an address,
the value of a name such as `api_key`, and in code and diffs the text of a private key. An expression such as
`${oc.env:TOKEN}` is no secret: the value stays in the environment. The default in `${oc.env:TOKEN,abc}` is a secret.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

REMOVED = "***"
"""Text in place of a secret."""

# The tokens of a tokenizer, and numbers of tokens, are no secrets. Most keys in small letters name a column. PWD is the
# working directory.
_NAME = (
    r"(?<!bos_|eos_|pad_|unk_|end_|top_)token(?![a-z0-9_])|secret|passw|passphrase|credential|authorization|"
    r"(?:api|access|private)[_-]?key|"
    r"(?<![a-z0-9])(?:account|anthropic|auth|aws|azure|deploy|encryption|hf|judge|license|master|openai|signing|ssh|"
    r"subscription|wandb)[_-]?key(?![a-z_])|"
    r"(?-i:(?<![A-Za-z0-9])(?:pwd|pat|auth|dsn)(?![\w-]))"
)
# A value in `judge.key=value`, `{'key': 'value'}` and `{key: value}`, but not in prose, and not in code of a traceback
# such as `sorted(rows, key=size)` or `{key: value for key in keys}`.
_KEY = r"(?-i:key)(?![\w-])"
# A variable of the environment. In small letters, a name such as `label_key` is an option.
_VARIABLE = r"(?-i:[A-Z0-9]_(?:KEY|PWD|PAT|AUTH|DSN)(?:_[0-9]+)?)(?![A-Za-z0-9_])"

_SECRET_NAME = re.compile(rf"{_NAME}|{_VARIABLE}|^[+~-]*{_KEY}$", re.IGNORECASE)
# A password may contain a slash that should have been written as %2F. A number behind the colon, or a character in the
# place of an expression, is a port.
_USER_AND_PASSWORD = re.compile(r"(?<=://)(?:[^\s/:]*:(?!(?:\d+|[\ue000-\uf8ff])/)[^\s\"']*@|[^\s/]*@)")
_SIGNATURE = re.compile(
    r"(?<=[?&])"
    r"((?:x-(?:amz|goog)-(?:signature|credential|security-token)|sig|signature|key|api_?key|token|access_token)=)"
    r"(?!\$\{)[^\s&\"']+",
    re.IGNORECASE,
)
_EXPRESSION = re.compile(r"(\$\{(?:[^${}]|\$\{[^${}]*\})*\})")
# The default of an expression whose value is elsewhere.
_DEFAULT = re.compile(r"(\$\{\s*oc\.(?:env|select)\s*:[^,{}]+),[^{}]*(?=\})")
_SECRET_DEFAULT = re.compile(
    rf"""([\w.-]*(?:{_NAME}|\.{_KEY})[\w-]*["']?\s*[:=]\s*["']?){_DEFAULT.pattern}""", re.IGNORECASE
)
_SCHEME = re.compile(r"(?:Bearer|Basic|Token)?\s*", re.IGNORECASE)
_FIRST_PLACE = 0xE000
"""First of the characters for private use, which stand for expressions while an address is searched."""
# A name with `=`, or a name in quotes or behind `{` or `,` with `:`. Expressions, true, false and null are no secrets.
_NAMED_VALUE = re.compile(
    rf"""([\w.+-]*(?:{_NAME})[\w-]*=|\w*{_VARIABLE}=|[\w+-]\.{_KEY}="""
    rf"""|(?:["'][\w.-]*(?:{_NAME})[\w-]*["']|[{{,]\s*[\w.-]*(?:{_NAME})[\w-]*)\s*:\s*"""
    rf"""|["']{_KEY}["']\s*:\s*(?=["'])|[{{,]\s*{_KEY}:\s*(?=["']|[^\s,}}]+\s*[,}}]))"""
    r"""(?!["']?\$\{|(?:true|false|null|none)\b)(?:"[^"]*"|'[^']*'|[^\s"',;&)}\]]+)""",
    re.IGNORECASE,
)
# Quoted text of a name, or a line with a name and a value, as in a .env file. A variable in code is no secret.
_IN_CODE = re.compile(
    rf"""([\w.-]*(?:{_NAME})[\w-]*["']?\s*[:=]\s*)(?:"[^"\n]+"|'[^'\n]+')"""
    rf"""|(^[-+ ]?\s*(?:export\s+)?(?:[\w.-]*(?:{_NAME})[\w-]*(?:=|:\s+)|\w*{_VARIABLE}=))(?!["'])[^\s(),]+$""",
    re.IGNORECASE | re.MULTILINE,
)
# A mark in quotes is code that looks for keys.
_PRIVATE_KEY = re.compile(
    r"(?s)(-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(?=[ \t\r]*(?:\n|\\n|\Z))|PuTTY-User-Key-File-\d:).*?"
    r"(-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|Private-MAC: *\w+|\Z)"
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
    """Return a text without secrets: addresses without user, password and signature, and `api_key=***`."""
    return _NAMED_VALUE.sub(rf"\g<1>{REMOVED}", _SECRET_DEFAULT.sub(r"\1\2", without_password(text)))


def without_password(text: str) -> str:
    """Return a text whose addresses have no user, no password and no signature."""
    return _SIGNATURE.sub(rf"\g<1>{REMOVED}", _USER_AND_PASSWORD.sub("", text))


def redacted_code(text: str) -> str:
    """Return source code or a diff without secrets: quoted values and lines `NAME=value`, addresses, private keys."""
    without_keys = _PRIVATE_KEY.sub(rf"\1{REMOVED}\2", text)
    return _IN_CODE.sub(lambda match: f"{match[1] or match[2]}{REMOVED}", without_password(without_keys))


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
    if value in (None, "", True, False):
        return value
    if isinstance(value, str) and "${" in value:
        return _redacted_parts(value) if is_secret(name) else _redacted_around_expressions(value)
    if is_secret(name):
        return REMOVED
    return without_password(value) if isinstance(value, str) else value


def _redacted_parts(secret: str) -> str:
    """Return a secret whose expressions stay, without their defaults."""
    parts = _EXPRESSION.split(secret)
    texts = [part if _SCHEME.fullmatch(part) else REMOVED for part in parts[::2]]
    expressions = [_DEFAULT.sub(r"\1", part) for part in parts[1::2]]
    return "".join(text + expression for text, expression in zip(texts, [*expressions, ""], strict=True))


def _redacted_around_expressions(text: str) -> str:
    """Return a text whose addresses have only expressions as passwords, such as `http://me:${oc.env:PASSWORD}@host`."""
    parts = _EXPRESSION.split(text)
    places = {chr(_FIRST_PLACE + number): without_password(part) for number, part in enumerate(parts[1::2])}

    def without_literals(user_and_password: re.Match[str]) -> str:
        user, colon, password = user_and_password[0].removesuffix("@").partition(":")
        password = password if colon else user
        if not password or any(character not in places for character in password):
            return ""
        return "".join(_DEFAULT.sub(r"\1", places.get(character, character)) for character in user_and_password[0])

    marked = "".join(part + place for part, place in zip(parts[::2], [*places, ""], strict=True))
    found = _USER_AND_PASSWORD.sub(without_literals, marked)
    return _SIGNATURE.sub(rf"\g<1>{REMOVED}", "".join(places.get(character, character) for character in found))


def redacted_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without secrets: `key=value`, and words behind an option such as --api-key."""
    return [_redacted_word(word, before) for before, word in pairwise(["", *words])]


def _redacted_word(word: str, before: str) -> str:
    if before.startswith("--") and "=" not in before and is_secret(before):
        return REMOVED
    name, equals, value = word.partition("=")
    return redacted(f"{name}={redacted_value(value, name.rpartition('.')[2])}" if equals else word)
