"""Secrets in texts, options and command lines."""

from __future__ import annotations

import pytest

from rl_plugins.redaction import is_secret, redacted, redacted_code, redacted_value, redacted_words
from rl_plugins.tests.loops import for_each


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MLflow at http://me:pa$$@word@host:5000/x is away", "MLflow at http://host:5000/x is away"),
        (
            "mysql+pymysql://me:word@host/db, git+https://ghp_1@github.com/a",
            "mysql+pymysql://host/db, git+https://github.com/a",
        ),
        ("http://me:a/b@host:5000/x", "http://host:5000/x"),
        ("reward.functions.judge.api_key=sk-1 run.steps=3", "reward.functions.judge.api_key=*** run.steps=3"),
        ("judge: {'path': 'j.py', 'api_key': 'sk-1 a'}", "judge: {'path': 'j.py', 'api_key': ***}"),
        ('{"Authorization": "Bearer a b", "n": 1}', '{"Authorization": ***, "n": 1}'),
        ("functions={judge: {api_key: sk-1}}", "functions={judge: {api_key: ***}}"),
        ("GET /x?access_token=abc&n=1", "GET /x?access_token=***&n=1"),
        ("HF_TOKEN=hf_1\nAWS_SECRET_ACCESS_KEY=a/b", "HF_TOKEN=***\nAWS_SECRET_ACCESS_KEY=***"),
        ("api_key=${oc.env:KEY} 'api_key': '${oc.env:KEY}'", "api_key=${oc.env:KEY} 'api_key': '${oc.env:KEY}'"),
        (
            "api_key=${oc.env:KEY,sk-1} 'api_key': '${oc.env:KEY,a b}'",
            "api_key=${oc.env:KEY} 'api_key': '${oc.env:KEY}'",
        ),
        ("judge.key=a1 db_pwd=a judge.auth=b pat=c", "judge.key=*** db_pwd=*** judge.auth=*** pat=***"),
        ("judge.key=${oc.env:KEY,sk-1} {key: 'a b'}", "judge.key=${oc.env:KEY} {key: ***}"),
        ("f={judge: {key: a1, pwd: b}, other: 'c'}", "f={judge: {key: ***, pwd: ***}, other: 'c'}"),
        ("{'key': 'a1', \"sentry_dsn\": \"b\", 'n': 1}", "{'key': ***, \"sentry_dsn\": ***, 'n': 1}"),
        (
            "JUDGE_KEY_2=sk-1 MYSQL_PWD=a GH_PAT=b SENTRY_DSN=c",
            "JUDGE_KEY_2=*** MYSQL_PWD=*** GH_PAT=*** SENTRY_DSN=***",
        ),
        (
            "https://h/a?x=1&sig=a%2Fb&y=2 s3://b/c?X-Amz-Signature=1a&token=2",
            "https://h/a?x=1&sig=***&y=2 s3://b/c?X-Amz-Signature=***&token=***",
        ),
    ],
)
def test_redacted_text_has_no_password_and_no_key(text: str, expected: str) -> None:
    assert redacted(text) == expected


@for_each(
    "text",
    [
        "models:/solver@champion", "http://host:5000/a@b", "s3://bucket/a@1", "sampling.max_tokens=abc: not a number",
        "stop_token_ids=[1,2] eos_token=</s> tokenizer=x max_token_age=3", "there is no token: make one",
        "use_secret=true api_key=null", "data.chosen_key=better label_key=sign PWD=/root A_KEY, B_KEY: the",
        "find?signal=1&keys=2",
        "an option is key=value; sorted(rows, key=size) option 'key': the value must be a text",
        "{key: rows[key] for key in rows}",
        "tracking.key_metric=a data.prompt_key=b judge.key_variable=C pattern=d author=e monkey.pattern=f OLDPWD=/",
        "{'label_key': 'sign', 'keys': 'a', 'patience': 3} {prompt_key: a, sort_key: b, authors: c}",
        "put the token into ~/.ray/auth_token, where the head has it",
    ],
)  # fmt: skip
def test_redacted_text_keeps_all_that_is_no_secret(text: str) -> None:
    assert redacted(text) == text


def test_redacted_code_removes_literals_and_keeps_variables() -> None:
    code = (
        '+API_KEY = "sk-1"\n+judge(api_key=key, token=self.token, url="http://me:word@host")\n+  password: word\n'
        "-export HF_TOKEN=hf_1\n+JUDGE_KEY=a\n tokens = 3\n+config = {'access_key': 'a b'}\n"
        '+pwd = "a"\n+key = "prompt"\n+rows.sort(key=size)\n+pat = re.compile("a")\n'
    )
    assert redacted_code(code) == (
        '+API_KEY = ***\n+judge(api_key=key, token=self.token, url="http://host")\n+  password: ***\n'
        "-export HF_TOKEN=***\n+JUDGE_KEY=***\n tokens = 3\n+config = {'access_key': ***}\n"
        '+pwd = ***\n+key = "prompt"\n+rows.sort(key=size)\n+pat = re.compile("a")\n'
    )


@for_each("kind", ["OPENSSH ", "RSA ", ""])
def test_redacted_code_removes_private_keys(kind: str) -> None:
    begin, end = f"+-----BEGIN {kind}PRIVATE KEY-----\n", f"-----END {kind}PRIVATE KEY-----\n+a = 1\n"
    assert redacted_code(f"{begin}+b3BlbnNz\n+aC1rZXk\n+{end}") == f"{begin[:-1]}***{end}"
    assert redacted_code(f"{begin}+b3BlbnNz\n+aC1rZXk") == f"{begin[:-1]}***", "a diff may end in the key"
    code = '+if "-----BEGIN PRIVATE KEY-----" in text:\n+    a = 1\n'
    assert redacted_code(code) == code
    assert "body" not in redacted_code("-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nbody\n")
    putty = "PuTTY-User-Key-File-3: ssh-ed25519\nPrivate-Lines: 1\nc2VjcmV0\nPrivate-MAC: 12ab\n"
    assert "c2VjcmV0" not in redacted_code(putty)


def test_redacted_value_removes_secrets_at_all_depths_and_keeps_expressions() -> None:
    options = {
        "reward": {"functions": {"judge": {"api_key": "sk-1", "password": 1234, "url": "http://me:word@host/v1"}}},
        "credentials": {"user": "me", "scopes": ["a"]},
        "headers": [{"Authorization": "Bearer ${oc.env:KEY}"}],
        "judge": {"key": "a1", "pwd": "b", "auth": {"user": "me", "word": "c"}, "label_key": "d"},
        "max_tokens": 8, "token": None, "secret": True, "path": "a@b",
    }  # fmt: skip
    assert redacted_value(options) == {
        "reward": {"functions": {"judge": {"api_key": "***", "password": "***", "url": "http://host/v1"}}},
        "credentials": {"user": "***", "scopes": ["***"]},
        "headers": [{"Authorization": "Bearer ${oc.env:KEY}"}],
        "judge": {"key": "***", "pwd": "***", "auth": {"user": "***", "word": "***"}, "label_key": "d"},
        "max_tokens": 8, "token": None, "secret": True, "path": "a@b",
    }  # fmt: skip


@for_each(
    ("name", "value", "expected"),
    [
        ("api_key", "${oc.env:KEY,sk-1}", "${oc.env:KEY}"),
        ("api_key", "sk-${oc.env:REST}", "***${oc.env:REST}"),
        ("uri", "http://me:word@${oc.env:HOST}:${oc.env:PORT,5000}", "http://${oc.env:HOST}:${oc.env:PORT,5000}"),
        ("uri", "http://me:${oc.env:WORD,word}@host", "http://me:${oc.env:WORD}@host"),
        ("uri", "http://${oc.env:TOKEN}@host/${run.name}", "http://${oc.env:TOKEN}@host/${run.name}"),
        ("uri", "http://ab${oc.env:TOKEN}@host", "http://host"),
        ("uri", "s3://${bucket}/a?sig=1&x=${oc.env:X,2}", "s3://${bucket}/a?sig=***&x=${oc.env:X,2}"),
        ("path", "${oc.env:${name},a}/b@c", "${oc.env:${name},a}/b@c"),
        ("uri", "${oc.env:URI,http://me:word@host}", "${oc.env:URI,http://host}"),
        (
            "uri",
            "http://${oc.env:HOST}:${oc.env:PORT}/models@champion",
            "http://${oc.env:HOST}:${oc.env:PORT}/models@champion",
        ),
        ("uri", "http://me:word:${oc.env:X}@host", "http://host"),
        ("api_key", "${ oc.env:KEY, sk-1 }", "${ oc.env:KEY}"),
        ("api_key", "${oc.select:judge.key,sk-1}", "${oc.select:judge.key}"),
    ],
)
def test_redacted_value_removes_secrets_around_expressions(name: str, value: str, expected: str) -> None:
    assert redacted_value(value, name) == expected


def test_redacted_words_removes_values_with_blanks_and_words_behind_options() -> None:
    words = [
        "grpo", "++judge.password=a b c", "--api-key", "sk-1", "tracking.uri=http://me:word@host", "run.name=a=b",
        "+judge.key=a b", "+key=a", "--pwd", "b", "data.label_key=sign",
    ]  # fmt: skip
    assert redacted_words(words) == [
        "grpo", "++judge.password=***", "--api-key", "***", "tracking.uri=http://host", "run.name=a=b",
        "+judge.key=***", "+key=***", "--pwd", "***", "data.label_key=sign",
    ]  # fmt: skip


def test_is_secret_judges_options_and_variables_by_name() -> None:
    secret = [
        "api_key",
        "HF_TOKEN",
        "auth-token",
        "JUDGE_APIKEY",
        "db_passwd",
        "client_secret",
        "GOOGLE_CREDENTIALS",
        "JUDGE_KEY",
        *("key", "--key", "pwd", "pat", "auth", "dsn", "db_pwd", "github_pat", "basic-auth", "sentry_dsn"),
        *("judge_key", "openai_key", "signing-key", "accountKey", "ssh_key"),
    ]
    harmless = [
        "max_tokens", "tokenizer", "label_key", "stop_token_ids", "max_token_age", "pad_token", "keys", "prompt_key",
        "key_metric", "key_variable", "judge_key_variable", "sort_key", "primary_key", "shelf_key", "monkey", "pattern",
        "path", "author", "PWD", "OLDPWD", "PATH",
    ]  # fmt: skip
    assert [name for name in secret + harmless if is_secret(name)] == secret
