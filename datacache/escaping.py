"""Text that others have made, names of files above all, as it can be printed and logged."""


def escaped(text: str) -> str:
    r"""Return ``text`` in one line that any terminal, log and UTF-8 file can take.

    Control characters, line breaks, marks of text direction and lone surrogates become what Python writes
    for them in a string. A byte of a file's name that is no UTF-8, for which Python has a surrogate, becomes
    ``\xff``. Backslashes stay as they are: to escape what is escaped changes nothing.

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
