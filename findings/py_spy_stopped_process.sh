#!/usr/bin/env bash
# py-spy 0.4.0 and a process in state T (stopped by SIGSTOP, Ctrl-Z or a debugger).
# `py-spy dump` prints the process's name and no stacks: "Failed to suspend process", status 1. One
# would expect that a process which stands still is the easiest to read. `--nonblocking`, which does not
# suspend it, prints them. The process stays stopped in both cases.
set -euo pipefail
folder=$(mktemp -d)
trap 'kill -KILL "$process" 2> /dev/null || true; rm -rf "$folder"' EXIT
process=
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet py-spy==0.4.0
spy="$folder/venv/bin/py-spy"
printf 'import time\ndef rests():\n    time.sleep(60)\nrests()\n' > "$folder/rests.py"
python3 "$folder/rests.py" &
process=$!
sleep 1
"$spy" --version
count() { # the stacks that a dump shows
    { "$spy" dump "$@" --pid "$process" 2> "$folder/error" || true; } | grep -c 'rests (' || true
}
running=$(count)
kill -STOP "$process"
sleep 0.5
stopped=$(count)
reason=$(grep -m 1 '^Error' "$folder/error" || true)
nonblocking=$(count --nonblocking)
state=$(sed -n 's/^State:[[:space:]]*//p' "/proc/$process/status")
echo "running: $running; stopped: $stopped ($reason); stopped, --nonblocking: $nonblocking; $state"
[[ $running = 1 && $stopped = 0 && $reason = *"Failed to suspend process"* && $nonblocking = 1 && $state = T* ]]
