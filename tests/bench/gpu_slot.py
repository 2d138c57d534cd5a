"""Stand-ins for the commands of ``benchmarks/gpu.sh``, which take no time but say that it has passed."""

import os
import subprocess

from tests import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu.sh"

STAND_IN = r"""#!/bin/bash
# Stands in for {name}: takes the seconds of the first pattern in times.txt that its words match, and has its status.
words="${{PYTORCH_NO_CUDA_MEMORY_CACHING:+uncached }}{name} $*"
exec 9>>{folder}/lock && flock 9
clock=$(< {folder}/clock)
echo "$words" >> {folder}/log
echo "${{*@Q}}" >> {folder}/quoted
case $words in
  date*) echo "$clock"; exit ;;
  nproc*) echo 1; exit ;;
  "python3 -c import expecttest") [[ ! -e {folder}/lacks_expecttest ]]; exit ;;
  "python3 -c"*"backend('native')"*) [[ -e {folder}/library && ! -e {folder}/lacks_native ]]; exit ;;
  "python3 -c"*"backend('triton')"*) [[ ! -e {folder}/lacks_triton ]]; exit ;;
  "python3 -c"*) exit ;;
  "python3 setup.py"*) touch {folder}/library ;;
esac
while IFS='|' read -r pattern seconds status; do
  if [[ $words == *"$pattern"* ]]; then
    ends=$((${{BEGAN:-$clock}} + (seconds < ${{LIMIT:-9999}} ? seconds : LIMIT)))
    echo $((ends > clock ? ends : clock)) > {folder}/clock # others ran at the same time
    ((seconds < ${{LIMIT:-9999}})) || exit 99
    cases={folder}/out/results.json
    ((status != 3)) || (($(grep -c . "$cases") >= 2)) || echo '"failed, ' >> "$cases" # the first two lose the device
    exit "$status"
  fi
done < {folder}/times.txt
"""
TIMEOUT = """#!/bin/bash
# Hands on what is left of the time, and says as timeout does what was cut off.
export LIMIT=$3 BEGAN=$(date)
"${@:4}"
code=$?
exit $((code == 99 ? 124 : code))
"""


class Slot:
    """A machine with a GPU, of stand-ins, and its clock."""

    def __init__(self, folder):
        self.folder, self.out = folder, folder / "out"
        (folder / "bin").mkdir()
        for name in ("python3", "date", "nproc", "nvidia-smi", "compute-sanitizer"):
            self._add(name, STAND_IN.format(name=name, folder=folder))
        self._add("timeout", TIMEOUT)
        (folder / "clock").write_text("0")
        self.take()

    def _add(self, name, text):
        (self.folder / "bin" / name).write_text(text)
        (self.folder / "bin" / name).chmod(0o755)

    def take(self, *times):
        """Each (part of a command, seconds, exit status): the first that fits counts."""
        (self.folder / "times.txt").write_text("".join(f"{'|'.join(map(str, it))}\n" for it in times))

    def call(self, *words, out=None):
        """Run the script; return its exit status, how long it took, and the commands that it ran."""
        began, path = self.clock, f"{self.folder / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        (self.folder / "log").write_text("")
        environment = os.environ | {"PATH": path, "HOME": str(self.folder)}
        command = ["bash", SCRIPT, out or self.out, *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.stderr == ""
        log = [it for it in (self.folder / "log").read_text().splitlines() if it not in ("date +%s", "date ", "nproc ")]
        return done.returncode, self.clock - began, log

    @property
    def clock(self):
        return int((self.folder / "clock").read_text())

    @property
    def parts(self):
        return [line.split() for line in (self.out / "parts.txt").read_text().splitlines()]
