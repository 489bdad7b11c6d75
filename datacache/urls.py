"""URLs as messages may show them: without the passwords and signatures that some carry."""

import re

MASK = "***"

_REFERENCE = r"(?!\$\{[^}]*\}@)"  # the place of a password that is none
_PASSWORD = re.compile(rf"(://[^\s/:@'\"]*:){_REFERENCE}[^\s/'\"]+(?=@)")
_TOKEN = re.compile(rf"(https?://){_REFERENCE}[^\s/:@'\"]+(?=@)")
_SIGNATURE = re.compile(r"(?i)([?&][\w.-]*(?:sig|token|secret|passw|key|credential)[\w.-]*=)[^\s&#'\"]+")


def without_secrets(text: str) -> str:
    """Return a text in which the passwords of URLs, and what signs them, are ``***``.

    >>> without_secrets("ftp://me:1234@host/x: no such folder")
    'ftp://me:***@host/x: no such folder'
    >>> without_secrets("https://host/x?sv=2024&sig=1a2b")
    'https://host/x?sv=2024&sig=***'
    """
    for pattern in (_PASSWORD, _TOKEN, _SIGNATURE):
        text = pattern.sub(rf"\g<1>{MASK}", text)
    return text
