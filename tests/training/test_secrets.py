"""What counts as a secret, and that no record, line or word shows it."""

import traceback
from types import SimpleNamespace
from typing import ClassVar

import pytest

from datacache.escaping import is_secret
from tests.launching import DIGITS
from tests.training.refusal import refused
from training.callbacks.files import DawnBench
from training.config.config import Config, ConfigurationError, load, load_with_warnings
from training.config.records import DatasetRecord
from training.config.secrets import MASK, in_clear, mask, resolved
from training.datasets import DATASETS, make_dataset
from training.run_folder import RunFolder

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfi=="
SECRETS = (
    *("key", "secret", "token", "password", "connection_string", "credential", "KEY_2", "Authorization"),
    *("AccountKey", "aws_access_key_id", "X-Amz-Signature", "sas_token"),
)
OTHERS = (
    *("keys", "monkey", "author", "tokenizer", "name", "path", "anon", "endpoint_url", "keep", "design"),
    3,
)


@pytest.mark.parametrize("key", [*SECRETS, *OTHERS])
def test_keys_that_name_a_secret_are_masked_and_others_keep_their_values(key):
    hides = key in SECRETS
    assert is_secret(key) == hides
    assert mask({key: SECRET}) == {key: MASK if hides else SECRET}
    assert list(in_clear({"options": {key: SECRET}})) == [f"options.{key}"] * hides


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
    "https://host/x?sv=1&sig={}",
    "dataset.storage.options.secret={}",
    "dataset={{name: cifar10, path: x, storage: {{options: {{key: {}, secret: {}}}}}}}",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey={};EndpointSuffix=b",
    "got {{'token': '{}', 'anon': False}}",
    "failed with password={}, no access",
])  # fmt: skip
def test_lines_and_words_with_a_secret(template):
    secret = "wJalrXUtnFEMI-K7MDENG"
    text = template.format(*[secret] * template.count("{}"))
    masked = mask(text)
    assert secret not in masked
    assert masked == template.format(*[MASK] * template.count("{}")).replace(f"'{MASK}'", MASK)


@pytest.mark.parametrize("line", [
    "dataset imagenet: storage: key: unknown option",
    "https://host/x?design=3&monkey=4&keyword=5",
    "https://host/x?sv=1&sig=${oc.env:SIGNATURE}&sp=r",
    "ftp://${oc.env:USER}:${oc.env:PASSWORD}@host/x",
    "epoch 1 of 4: loss 2.30, test accuracy 10.0 %, 3.1 s",
])  # fmt: skip
def test_lines_without_a_secret_stay(line):
    assert mask(line) == line


# in configurations

RUN = """
name: secret
dataset:
  name: imagenet
  path: {path}
  storage:
    threads: 2
    options: {{key: {key}, endpoint_url: "http://host", client_kwargs: {{token: {key}}}}}
model: resnet20
dawnbench: {{code_url: "https://me:{url}@host/code"}}
phases:
  - {{epochs: 1, input_size: 32, batch_size: 8, learning_rate: {{start: 0.1, end: 0.0}}}}
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Return a function that writes a run, and all that is written or printed of its configuration."""

    class Folder:
        path = tmp_path
        texts: ClassVar[dict[str, str]] = {}

        def write_file(self, name, content):
            self.texts[name] = content

    def written(path="/data", key=SECRET, url=SECRET) -> tuple[Config, list[str], str]:
        file = tmp_path / "run.yaml"
        file.write_text(RUN.format(path=path, key=key, url=url.replace("/", "_")))
        loaded = load_with_warnings(file)
        RunFolder.write_config(Folder(), loaded.config)
        about = {"task": SimpleNamespace(metrics={}), "ranks": SimpleNamespace(hardware="hardware")}
        DawnBench().on_run_begin(SimpleNamespace(folder=Folder(), config=loaded.config, **about))
        (tmp_path / "config.yaml").write_text(Folder.texts["config.yaml"])
        texts = [*Folder.texts.values(), *loaded.warnings, repr(loaded.config), str(loaded.config.dataset)]
        return loaded.config, loaded.warnings, "\n".join(texts)

    return written


def test_a_secret_in_clear_is_warned_of_and_written_nowhere(written):
    config, warnings, text = written(path=f"ftp://me:{SECRET.replace('/', '_')}@host/x?sig={SECRET}")
    assert SECRET not in text
    assert SECRET.replace("/", "_") not in text
    assert [line.partition(": ")[0] for line in warnings] == [
        "dataset.path",
        "dataset.storage.options.key",
        "dataset.storage.options.client_kwargs.token",
        "dawnbench.code_url",
    ]
    assert config.dataset.options["storage"]["options"]["key"] == SECRET  # the storage gets it
    assert "endpoint_url: http://host" in text


def test_a_reference_to_a_secret_stays_one_and_is_read_back(written, monkeypatch, tmp_path):
    monkeypatch.setenv("STORAGE_SECRET", SECRET)
    reference = "${oc.env:STORAGE_SECRET}"
    config, warnings, text = written(path=f"ftp://me:{reference}@host/x", key=f'"{reference}"', url=reference)
    assert warnings == []
    assert SECRET not in text
    assert text.count(f"key: {reference}") == text.count(f'"key": "{reference}"') == 1
    assert f"ftp://me:{reference}@host/x" in text
    again = load(tmp_path / "config.yaml")
    assert again == config
    assert resolved(again.dataset.options)["storage"]["options"]["key"] == SECRET


def test_what_was_masked_is_not_taken_for_the_secret(written, tmp_path):
    written(url="")
    with refused("dataset.storage.options.key: expected a reference such as"):
        load(tmp_path / "config.yaml")


@pytest.mark.parametrize("word", [
    "dataset.storage.options.secret={}",
    "dataset={{name: cifar10, path: x, storage: {{options: {{password: {}}}}}}}",
    "dataset.path=ftp://me:{}@host/x",
])  # fmt: skip
def test_a_word_with_a_secret_is_refused_without_it(word, tmp_path):
    secret = "1a2b3c4d5e"
    with pytest.raises(ConfigurationError) as caught:
        load(DIGITS, [word.format(secret)])
    shown = "".join(traceback.format_exception(caught.value)).partition("load(DIGITS")[2]
    assert secret not in shown
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://me:{}@localhost:1/x", "http://me:{}@localhost:1/x?sig={}"])
def test_the_storage_gets_the_secret_and_no_message_does(url, monkeypatch):
    monkeypatch.setenv("STORAGE_SECRET", "1a2b3c4d5e")
    path, storage = url.replace("{}", "${oc.env:STORAGE_SECRET}"), {"attempts": 1, "threads": 1}
    record = DatasetRecord(name="imagenet", path=path, storage=storage)
    with pytest.raises(ValueError, match=r"dataset imagenet: ") as caught:
        record.make()
    assert "1a2b3c4d5e" not in "".join(traceback.format_exception(caught.value))
    assert resolved(path) == url.replace("{}", "1a2b3c4d5e")


def test_manifests_are_kept_under_names_without_secrets(tmp_path, monkeypatch):
    plain = make_dataset("synthetic", samples=2, test_samples=1)
    monkeypatch.setitem(DATASETS, "imagenet", lambda path: plain)
    dataset = make_dataset("imagenet", "https://me:1a2b3c@host/x?sig=1a2b3c")
    dataset.manifest("training", tmp_path)
    assert dataset.identity == "imagenet https://me:***@host/x?sig=***"
    assert any(path.suffix == ".npz" for path in tmp_path.iterdir())
    assert not any("1a2b3c" in path.name or b"1a2b3c" in path.read_bytes() for path in tmp_path.iterdir())
