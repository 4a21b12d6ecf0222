"""Python's own language reference, as help() prints it: prose that needs no download."""

import functools
import hashlib
import platform


class PythonReference:
    """Records `{"text", "name"}`: a topic of Python's help each, such as "classes" or "yield".

    They come with every Python, from `pydoc_data.topics`, and differ a little between versions.

    Raises:
        FileNotFoundError: this Python was installed without them, when they are first read.
    """

    @functools.cached_property
    def _topics(self) -> list[tuple[str, str]]:
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise FileNotFoundError(
                "this Python has no pydoc_data.topics; install its documentation package, or use "
                "another source"
            ) from error
        return sorted(topics.items())

    @functools.cached_property
    def fingerprint(self) -> str:
        """See `Source`."""
        sha = hashlib.sha256(repr(self._topics).encode())
        return f"python_reference-{sha.hexdigest()[:16]}"

    def __len__(self) -> int:
        return len(self._topics)

    def __getitem__(self, index: int) -> dict[str, str]:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self):,}")
        name, text = self._topics[index]
        return {"text": text, "name": name}

    def where(self, index: int) -> str:
        """Which topic it is."""
        return f"topic {self._topics[index][0]!r} of Python's help"

    def __str__(self) -> str:
        return f"the language reference of Python {platform.python_version()}"
