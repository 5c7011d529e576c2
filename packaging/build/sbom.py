"""The bill of materials: the crates that the programs are linked from, in CycloneDX JSON."""
import importlib.machinery, importlib.util, json, re, uuid

from release import ROOT

# The files from which the versions and checksums come.
LOCKS = ["Cargo.lock", "src/comm/plugin/Cargo.lock"]


def build(release, out):
    licenses = load_licenses()
    checksums = {}
    for lock in LOCKS:
        for block in (ROOT / lock).read_text().split("[[package]]")[1:]:
            field = dict(re.findall(r'^(name|version|checksum) = "(.+)"', block, re.M))
            checksums[field["name"], field["version"]] = field.get("checksum")
    crates = sorted(licenses.linked().items())
    components = [component(*key, package, checksums.get(key)) for key, package in crates]
    target = out / f"trireme-{release.version}.cdx.json"
    target.write_text(json.dumps(document(release, components), indent=1) + "\n")
    print(f"{target.name}: {len(components)} crates")


def load_licenses():
    """`scripts/licenses`, which lists the crates of the programs, as a module."""
    loader = importlib.machinery.SourceFileLoader("licenses", str(ROOT / "scripts/licenses"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("licenses", loader))
    loader.exec_module(module)
    return module


def component(name, version, package, checksum):
    url = f"pkg:cargo/{name}@{version}"
    entry = {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
    # Crates may separate alternatives by a slash, which SPDX does not know.
    entry["licenses"] = [{"expression": re.sub(r"\s*/\s*", " OR ", package["license"])}]
    if checksum:
        entry["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    if package.get("repository"):
        entry["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return entry


def document(release, components):
    url = f"pkg:cargo/trireme@{release.version}"
    program = {"type": "application", "bom-ref": url, "name": "trireme", "version": release.version, "purl": url}
    program["licenses"] = [{"license": {"id": "Apache-2.0"}}]
    # The same crates give the same number.
    content = json.dumps(components, sort_keys=True)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, url + content)}",
        "version": 1,
        "metadata": {"timestamp": release.time("%Y-%m-%dT%H:%M:%SZ"), "component": program},
        "components": components,
        "dependencies": [{"ref": url, "dependsOn": [entry["bom-ref"] for entry in components]}],
    }
