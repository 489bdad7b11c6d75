"""What counts as a secret, and that no record, line or word shows it."""

import pytest

from training.secrets import MASK, in_clear, is_secret, mask, resolved

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfi=="


@pytest.mark.parametrize(
    "key",
    [
        *("key", "secret", "token", "password", "passwd", "connection_string", "sas", "credential", "KEY_2"),
        *("account_key", "AccountKey", "aws_secret_access_key", "aws_access_key_id", "AWSAccessKeyId"),
        *("X-Amz-Signature", "X-Amz-Credential", "sas_token", "client_secret", "private_key", "api-key"),
        *("dataset.storage.options.secret", "options[secret]", "Authorization", "ConnectionString"),
    ],
)
def test_keys_that_name_a_secret(key):
    assert is_secret(key)
    assert mask({key: SECRET}) == {key: MASK}
    assert list(in_clear({"options": {key: SECRET}})) == [f"options.{key}"]


@pytest.mark.parametrize(
    "key",
    ["keys", "monkey", "author", "tokenizer", "name", "path", "anon", "endpoint_url", "keep", "design", 3],
)
def test_other_keys_keep_their_values(key):
    assert not is_secret(key)
    assert mask({key: "plain"}) == {key: "plain"}


def test_everything_below_a_secret_is_masked_and_nothing_but_text_and_numbers():
    assert mask({"credential": {"user": "me", "nested": ["a", 1, None, True]}}) == {
        "credential": {"user": MASK, "nested": [MASK, MASK, None, True]}
    }
    assert mask({"token": "anon", "key": "", "secret": None}) == {"token": "anon", "key": "", "secret": None}
    assert mask([{"secret": 5}, ("a", {"password": 1.5})]) == [{"secret": MASK}, ("a", {"password": MASK})]


def test_references_stay_and_are_what_the_environment_says(monkeypatch):
    options = {
        "secret": "${oc.env:STORAGE_SECRET}",
        "headers": {"Authorization": "Bearer ${oc.env:STORAGE_SECRET}"},
    }
    url = "ftp://me:${oc.env:STORAGE_SECRET}@host/x"
    assert mask(options) == options
    assert mask(url) == url
    assert list(in_clear({"path": url, "options": options})) == []
    monkeypatch.setenv("STORAGE_SECRET", SECRET)
    assert resolved([options, url]) == [
        {"secret": SECRET, "headers": {"Authorization": f"Bearer {SECRET}"}},
        f"ftp://me:{SECRET}@host/x",
    ]
    monkeypatch.delenv("STORAGE_SECRET")
    with pytest.raises(ValueError, match="expected the environment to have STORAGE_SECRET"):
        resolved(options)


@pytest.mark.parametrize("template", [
    "ftp://me:{}@host/x",
    "https://{}@host/x",
    "s3://bucket/x?X-Amz-Signature={}&X-Amz-Date=1",
    "https://host/x?sv=1&sig={}",
    "dataset.storage.options.secret={}",
    "dataset={{name: cifar10, path: x, storage: {{options: {{key: {}, secret: {}}}}}}}",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey={};EndpointSuffix=b",
    "got {{'token': '{}', 'anon': False}}",
    '{{"password": "{}"}}',
    "failed with password={}, no access",
])  # fmt: skip
def test_lines_and_words_with_a_secret(template):
    secret = "wJalrXUtnFEMI-K7MDENG"
    text = template.format(*[secret] * template.count("{}"))
    masked = mask(text)
    assert secret not in masked
    assert masked == template.format(*[MASK] * template.count("{}")).replace(f"'{MASK}'", MASK).replace(
        f'"{MASK}"', MASK
    )


@pytest.mark.parametrize("word", ["a b", SECRET, "{a: b, c: d}", "'quoted'", "x,y;z&#"])
def test_all_of_a_word_is_its_value(word):
    assert mask(f"dataset.storage.options.secret={word}") == f"dataset.storage.options.secret={MASK}"


@pytest.mark.parametrize("line", [
    "seed: expected key=value",
    "dataset imagenet: storage: key: unknown option",
    "phases.0.density=0.05",
    "s3://bucket/folder?versionId=3",
    "abfs://container@account.dfs.core.windows.net/x",
    "ssh://me@host/x",
    "exclude: (^|/)(bias|gamma|beta)$",
    "epoch 1 of 4: loss 2.30, test accuracy 10.0 %, 3.1 s",
])  # fmt: skip
def test_lines_without_a_secret_stay(line):
    assert mask(line) == line
