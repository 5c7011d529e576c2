"""Errors, as models raise and return them."""


class TritonModelException(Exception):
    """Raised by a model to refuse its requests, and by this module for what it cannot do."""


class TritonError:
    """An error in place of a response's tensors."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    __slots__ = ("_message", "_code")

    def __init__(self, message, code=INTERNAL):
        if not 0 <= code <= TritonError.CANCELLED:
            raise ValueError("error code %r is not one of TritonError's" % (code,))
        self._message, self._code = str(message), int(code)

    def message(self):
        """The words a client reads."""
        return self._message

    def code(self):
        """One of TritonError's constants."""
        return self._code

    def __repr__(self):
        return "TritonError(%r, %d)" % (self._message, self._code)


def describe(error):
    """`Type: words`, then where, innermost call first, without the calls of this package."""
    import os
    import traceback

    lines = ["%s: %s" % (type(error).__name__, error)]
    if isinstance(error, SyntaxError) and error.filename:
        lines[0] = "%s: %s" % (type(error).__name__, error.msg)
        return "%s\n\nAt:\n  %s(%s): <module>\n" % (lines[0], error.filename, error.lineno)
    here = os.path.dirname(os.path.abspath(__file__))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.dirname(os.path.abspath(frame.filename)) != here and not frame.filename.startswith("<frozen ")
    ]
    if not frames:
        return lines[0]
    lines += ["", "At:"]
    lines += ["  %s(%s): %s" % (frame.filename, frame.lineno, frame.name) for frame in reversed(frames)]
    return "\n".join(lines) + "\n"
