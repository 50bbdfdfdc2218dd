#!/bin/sh
# Prints the line coverage of rl_plugins, strategies, callbacks and recipes by the tiers of tests that are its arguments.
# Every process that the tests start is measured, also those that are killed: each saves its lines every few seconds.
# Call it from the root of the checkout: make coverage.
set -eu

root=$(pwd -P)
data=$(mktemp -d)
trap 'rm -rf "$data"' EXIT
site=$(python -c "import site; print(site.getsitepackages()[0])")
cp requirements/measured_lines.py "$site/rl_plugins_measured_lines.py"
echo 'import os; "MEASURED_LINES" in os.environ and __import__("rl_plugins_measured_lines")' > "$site/rl_plugins_measured_lines.pth"
cat > "$data/config" <<END
[run]
source =
    $root/rl_plugins
    $root/strategies
    $root/callbacks
    $root/recipes
# Inside a sandbox nothing can be measured: its processes have no other files, and must have one thread.
omit =
    */tests/*
    */sandbox/server.py
    */sandbox/supervisor.py
    */sandbox/kernel.py
    */sandbox/seccomp.py
data_file = $data/lines
disable_warnings = no-data-collected,module-not-imported,module-not-measured,already-imported
concurrency = thread
END
# OmegaConf words its errors otherwise while a tracer is at work.
OC_CAUSE=0 MEASURED_LINES="$data/config" make --no-print-directory "$@" || status=$?
python -m coverage combine --quiet --rcfile "$data/config"
python -m coverage report --rcfile "$data/config" --precision 1
exit "${status:-0}"
