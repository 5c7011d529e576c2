"""Recorded figures of other servers, beside ours: docs/figures/peers_h200.json."""
import json, pathlib

FILE = pathlib.Path(__file__).resolve().parent.parent / "docs/figures/peers_h200.json"


def shape_of(checkpoint, peers):
    """The recorded shape of a checkpoint: the one whose fields all have the values of its config.json; `None` if there is none."""
    config = json.loads((pathlib.Path(checkpoint) / "config.json").read_text())
    found = config | {"quant_method": (config.get("quantization_config") or {}).get("quant_method")}
    is_it = lambda shape: all(found.get(key) == value for key, value in ({"quant_method": None} | shape["config"]).items())
    return next((name for name, shape in peers["shapes"].items() if is_it(shape)), None)


def ratio(name, ours, peer):
    """How much better we are: above 1 for a shorter time or a higher rate."""
    return ours / peer if name.endswith("_per_s") else peer / ours


def table(figures, peers, shape):
    """Lines of ours, the best peer, our ratio to it, the goal, and each peer's own figure, for every world size with peers."""
    lines = []
    for size, ours in figures["worlds"].items():
        servers = dict(peers["shapes"][shape]["worlds"].get(str(size), {}))
        goal = servers.pop("goal", {})
        if not servers:
            continue
        lines.append(f"{f'{shape}, {size} GPUs':36}{'ours':>10}{'best peer':>12}{'ratio':>8}{'goal':>10}   " + ", ".join(servers))
        for name in dict.fromkeys(name for server in servers.values() for name in server):
            known = {server: row[name] for server, row in servers.items() if name in row}
            best = (max if name.endswith("_per_s") else min)(known.values())
            mine = ours.get(name)
            show = lambda value: "-" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.2f}"
            share = "-" if mine is None else f"{ratio(name, mine, best):.2f}"
            lines.append(f"{name:36}{show(mine):>10}{show(best):>12}{share:>8}{show(goal.get(name)):>10}   "
                         + ", ".join(show(known.get(server)) for server in servers))
    return lines + [f"peers: {peers['source']}", f"peers' workload: {peers['workload']}"]


def print_beside(figures, checkpoint, shape=None):
    """Prints our figures beside the peers'."""
    peers = json.loads(FILE.read_text())
    shape = shape or shape_of(checkpoint, peers)
    if shape not in peers["shapes"]:
        print(f"no peer was measured with this shape; recorded are: {', '.join(peers['shapes'])}")
        return
    print("\n".join(table(figures, peers, shape)))
