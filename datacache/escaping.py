"""Text made safe to print: control characters of untrusted names escaped, secrets masked in URLs."""

import re


def escaped(text: str) -> str:
    r"""Return ``text`` as one line that is safe for terminals, logs and UTF-8 files.

    Control characters, line breaks, text direction marks and lone surrogates become Python's escape
    sequences. A byte of a file name that is not UTF-8, for which Python has a surrogate, becomes ``\xff``.
    Backslashes do not change, so escaping twice is the same as once.

    >>> print(escaped("a name\n\x1b[31m"), escaped(b"caf\xe9.png".decode(errors="surrogateescape")))
    a name\n\x1b[31m caf\xe9.png
    """
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    if "\udc80" <= character <= "\udcff":
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


MASK = "***"

# A word of a name, however its words are joined: account_key, AccountKey, X-Amz-Signature.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# "tokens" is not among them: in configurations it is a number of tokens of a text.
_SECRETS = """
secret secrets password passwd pwd pass passphrase passcode token credential credentials sas sig
signature authorization auth cookie cookies accesskey accesstoken accountkey apikey authtoken privatekey
sastoken secretaccesskey secretkey sessiontoken
"""
_SECRET_WORDS = frozenset(_SECRETS.split())
_SECRET_ENDINGS = (("key",), ("key", "id"), ("connection", "string"), ("conn", "str"))

_REFERENCE = r"\$\{[^}\s]*\}"  # such as ${oc.env:NAME}, which refers to a secret and is none
_USER = rf"(?:{_REFERENCE}|(?!\$\{{)[^\s/:@'\"])*"
_PASSWORD = re.compile(rf"(://{_USER}:)(?!{_REFERENCE}@)[^\s/'\"]+(?=@)")
_TOKEN = re.compile(rf"(https?://)(?!{_REFERENCE}@)[^\s/:@'\"]+(?=@)")
_PARAMETER = re.compile(rf"([?&]([\w.-]+)=)(?!{_REFERENCE}(?:[\s&#'\"]|$))[^\s&#'\"]+")


def is_secret(name: object) -> bool:
    """Return whether a key of a configuration, of storage options or of a URL's query names a secret.

    >>> [is_secret(name) for name in ("secret", "aws_access_key_id", "AccountKey", "X-Amz-Signature")]
    [True, True, True, True]
    >>> [is_secret(name) for name in ("token", "tokens", "keys")]
    [True, False, False]
    """
    words = tuple(word.lower() for word in _WORDS.findall(str(name).rpartition(".")[2]))
    return not _SECRET_WORDS.isdisjoint(words) or any(words[-len(end) :] == end for end in _SECRET_ENDINGS)


def without_secrets(text: str) -> str:
    """Return a text with the passwords and signatures of URLs replaced by ``***``.

    >>> without_secrets("ftp://me:1234@host/x: no such folder")
    'ftp://me:***@host/x: no such folder'
    >>> without_secrets("https://host/x?sv=2024&sig=1a2b")
    'https://host/x?sv=2024&sig=***'
    """
    for pattern in (_PASSWORD, _TOKEN):
        text = pattern.sub(rf"\g<1>{MASK}", text)
    return _PARAMETER.sub(lambda found: found[1] + MASK if is_secret(found[2]) else found[0], text)
