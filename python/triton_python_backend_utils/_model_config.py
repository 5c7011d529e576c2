"""A model's configuration: looking into it, and completing it."""

import copy


def get_input_config_by_name(model_config, name):
    """The configuration of the input called `name`, or None."""
    return _find(model_config, "input", name)


def get_output_config_by_name(model_config, name):
    """The configuration of the output called `name`, or None."""
    return _find(model_config, "output", name)


def _find(model_config, kind, name):
    return next((tensor for tensor in model_config.get(kind, ()) if tensor.get("name") == name), None)


def using_decoupled_model_transaction_policy(model_config):
    """Whether a request may have any number of responses."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


class ModelConfig:
    """What `auto_complete_config` gets and returns. Settings the user wrote may be added to, not contradicted."""

    def __init__(self, model_config):
        self._model_config = copy.deepcopy(model_config)

    def as_dict(self):
        """The configuration."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size):
        """The largest batch. ValueError if the configuration has another, smaller one."""
        have = self._model_config.get("max_batch_size", 0)
        if have > max_batch_size:
            raise ValueError(
                "configuration specified max_batch_size %d, but in auto-complete-config function for model '%s' "
                "specified max_batch_size %d" % (have, self._model_config["name"], max_batch_size)
            )
        if not have:
            self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self):
        """Requests are batched, unless the configuration schedules them otherwise."""
        if not any(self._model_config.get(kind) for kind in ("sequence_batching", "ensemble_scheduling")):
            if self._model_config.get("dynamic_batching") is None:
                self._model_config["dynamic_batching"] = {}
        elif self._model_config.get("max_batch_size", 0) > 0:
            raise ValueError(
                "model '%s' has another scheduler than dynamic batching" % self._model_config["name"]
            )

    def set_model_transaction_policy(self, transaction_policy_dict):
        """`{"decoupled": bool}`."""
        for key in transaction_policy_dict:
            if key != "decoupled":
                raise ValueError(
                    "model transaction property in auto-complete-config function for model '%s' contains property "
                    "other than 'decoupled'" % self._model_config["name"]
                )
        if "decoupled" not in transaction_policy_dict:
            raise ValueError(
                "model transaction policy in auto-complete-config function for model '%s' is missing 'decoupled'"
                % self._model_config["name"]
            )
        have = self._model_config.get("model_transaction_policy") or {}
        if have.get("decoupled") and not transaction_policy_dict["decoupled"]:
            raise ValueError(
                "configuration specified decoupled transaction policy, which auto-complete-config for model '%s' "
                "contradicts" % self._model_config["name"]
            )
        self._model_config["model_transaction_policy"] = dict(transaction_policy_dict)

    def add_input(self, input):
        """A dict with `name`, `data_type` and `dims`, perhaps `optional` and more."""
        self._add("input", input, ("name", "data_type", "dims", "optional", "allow_ragged_batch", "reshape", "format",
                                   "is_shape_tensor"))

    def add_output(self, output):
        """A dict with `name`, `data_type` and `dims`."""
        self._add("output", output, ("name", "data_type", "dims", "label_filename", "reshape", "is_shape_tensor"))

    def _add(self, kind, tensor, allowed):
        model = self._model_config["name"]
        for key in tensor:
            if key not in allowed:
                raise ValueError(
                    "%s in auto-complete-config function for model '%s' contains property '%s', which is none of %s"
                    % (kind, model, key, ", ".join(allowed))
                )
        if "name" not in tensor:
            raise ValueError("%s in auto-complete-config function for model '%s' is missing 'name'" % (kind, model))
        for key in ("data_type", "dims"):
            if key not in tensor:
                raise ValueError(
                    "%s '%s' in auto-complete-config function for model '%s' is missing '%s'"
                    % (kind, tensor["name"], model, key)
                )
        have = _find(self._model_config, kind, tensor["name"])
        if have is None:
            self._model_config.setdefault(kind, []).append(dict(tensor))
            return
        for key in ("data_type", "dims"):
            given = [int(size) for size in have[key]] if key == "dims" else have.get(key)
            if given not in (None, [], "TYPE_INVALID") and given != tensor[key]:
                raise ValueError(
                    "unable to set %s of %s '%s' of model '%s': the configuration says %s, auto-complete-config says "
                    "%s" % (key, kind, tensor["name"], model, given, tensor[key])
                )
            have[key] = tensor[key]
        for key in tensor:
            have.setdefault(key, tensor[key])
