"""Untrusted text, such as file names, escaped so that it can be printed and logged."""


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
