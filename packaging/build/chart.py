"""The Helm chart as an archive, with the version of the release."""
import pathlib, re

import archive
from release import ROOT, copy_tree, scratch_folder


def build(release, out):
    with scratch_folder() as scratch:
        folder = pathlib.Path(scratch) / "trireme"
        copy_tree(ROOT / "packaging/helm/trireme", folder)
        chart = folder / "Chart.yaml"
        text = re.sub(r"^version: .*", f"version: {release.version}", chart.read_text(), flags=re.M)
        chart.write_text(re.sub(r"^appVersion: .*", f'appVersion: "{release.version}"', text, flags=re.M))
        target = out / f"trireme-chart-{release.version}.tgz"
        archive.write_tar_gz(target, folder, "trireme", release.epoch, release.level)
    print(f"{target.name}: {target.stat().st_size / 1e3:.0f} kB")
