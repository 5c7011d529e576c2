"""What the server does for a model: its log, its metrics, its other models."""

import math
import sys

from . import _channel
from ._errors import TritonModelException
from ._runtime import channel, runtime


class Logger:
    """The server's log. Messages carry the model's file and line."""

    INFO, WARNING, ERROR, VERBOSE = range(4)

    @staticmethod
    def log(message, level=INFO):
        """Writes a message at a level."""
        _log(message, level)

    @staticmethod
    def log_info(message):
        """Writes an informational message."""
        _log(message, Logger.INFO)

    @staticmethod
    def log_warn(message):
        """Writes a warning."""
        _log(message, Logger.WARNING)

    @staticmethod
    def log_error(message):
        """Writes an error."""
        _log(message, Logger.ERROR)

    @staticmethod
    def log_verbose(message):
        """Writes a message that shows with `--log-verbose`."""
        _log(message, Logger.VERBOSE)


def _log(message, level):
    if level not in range(4):
        raise TritonModelException("log level %r is none of Logger.INFO, WARNING, ERROR, VERBOSE" % (level,))
    if level == Logger.VERBOSE and not runtime.log_verbose:
        return
    caller = sys._getframe(2)
    line = "%s:%d" % (caller.f_code.co_filename, caller.f_lineno)
    if runtime.channel is None:
        print(line, message, file=sys.stderr)
    else:
        runtime.channel.send(_channel.LOG, level, line, str(message))


class MetricFamily:
    """Metrics of one name, distinguished by labels. Shared with every model that makes the same family."""

    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, name, description, kind):
        if kind not in range(3):
            raise TritonModelException("kind %r is none of MetricFamily.COUNTER, GAUGE, HISTOGRAM" % (kind,))
        self._kind = kind
        self._number = channel().call("metric_family", name, description, kind)

    def Metric(self, labels=None, buckets=None):
        """The metric with these labels; a histogram needs its buckets' upper bounds, ascending."""
        return Metric(self, labels, buckets)

    def __del__(self):
        _drop(self)


class Metric:
    """One value of a MetricFamily."""

    def __init__(self, family, labels, buckets):
        labels = {str(key): str(value) for key, value in (labels or {}).items()}
        buckets = [float(bound) for bound in buckets or ()]
        if bool(buckets) != (family._kind == MetricFamily.HISTOGRAM):
            raise TritonModelException("a histogram needs `buckets`, and other metrics have none")
        if any(low >= high for low, high in zip(buckets, buckets[1:])) or any(map(math.isnan, buckets)):
            raise TritonModelException("`buckets` must ascend, found %s" % buckets)
        # Keeps the family while the metric lives.
        self._family = family
        pairs = tuple(labels.items())
        self._number = channel().call("metric", family._number, pairs, tuple(buckets))

    def increment(self, value):
        """Adds to a counter or gauge; a counter takes nothing negative."""
        if self._family._kind == MetricFamily.COUNTER and value < 0:
            raise TritonModelException("a counter cannot be incremented by %r" % (value,))
        self._change("increment", value, MetricFamily.COUNTER, MetricFamily.GAUGE)

    def set(self, value):
        """Sets a gauge."""
        self._change("set", value, MetricFamily.GAUGE)

    def observe(self, value):
        """Adds an observation to a histogram."""
        self._change("observe", value, MetricFamily.HISTOGRAM)

    def value(self):
        """The value of a counter or gauge."""
        if self._family._kind == MetricFamily.HISTOGRAM:
            raise TritonModelException("a histogram has no single value")
        return channel().call("metric_value", self._number)

    def _change(self, operation, value, *kinds):
        if self._family._kind not in kinds:
            raise TritonModelException("`%s` is not for this kind of metric" % operation)
        channel().send(_channel.METRIC, operation, self._number, float(value))

    def __del__(self):
        _drop(self)


def _drop(metric):
    number = getattr(metric, "_number", None)
    if number is not None and runtime.channel is not None:
        try:
            runtime.channel.send(_channel.METRIC, "drop", number, 0.0)
        except Exception:  # The server is gone, and the metric with it.
            pass


def load_model(model_name, config="", files=None):
    """Has the server load a model, with a configuration (JSON) and files (`file:<version>/<name>`) if given."""
    given = {}
    for name, content in (files or {}).items():
        if not name.startswith("file:"):
            raise TritonModelException("file `%s` is not of the form `file:<version>/<name>`" % name)
        given[name[len("file:"):]] = bytes(content)
    channel().call("load_model", model_name, config or "", given)


def unload_model(model_name, unload_dependents=False):
    """Has the server unload a model, with the models an ensemble is made of if `unload_dependents`."""
    channel().call("unload_model", model_name, bool(unload_dependents))


def is_model_ready(model_name, model_version=""):
    """Whether a request to the model would be served now."""
    return channel().call("is_model_ready", model_name, str(model_version))
