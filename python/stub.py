"""Starts a model process. Its standard input is the socket to the server."""

import marshal
import os
import struct
import sys

try:
    import numpy  # noqa: F401
except ImportError as error:
    words = "%s has no NumPy (%s); install it with `%s -m pip install numpy`" % (sys.executable, error, sys.executable)
    refusal = marshal.dumps((0, (1, words, ""), None, False), 2)
    os.write(0, struct.pack("<I", len(refusal)) + refusal)
    sys.exit(words)

from triton_python_backend_utils._runner import main

main()
