# shellcheck shell=bash
# Sourced by the test scripts: results in TAP, one line a case, and the closing sum.
# GROUP names the script in every line.
GROUP=${GROUP:-${0##*/}}
ONLY=${ONLY:-.}    # run the cases whose name matches this regex
SHARD=${SHARD:-0/1} # K/N: of those, every Nth, from the Kth
passed=0 failed=0 skipped=0 candidates=0

ok() { passed=$((passed + 1)); echo "ok $GROUP/$1"; }
not_ok() { failed=$((failed + 1)); echo "not ok $GROUP/$1: $2"; }
skip() { skipped=$((skipped + 1)); echo "ok $GROUP/$1 # SKIP $2"; }

# selected CASE: shall it run? Asked once for each case.
selected() {
    [[ $1 =~ $ONLY ]] && (((candidates++ % ${SHARD#*/}) == ${SHARD%/*}))
}

# Prints the last telling line of a log, on one line of bounded length.
last_line() {
    { grep -aiE 'error|fail|unable|cannot|can.t|could ?n.t|no such|not (found|supported)|mismatch|invalid' "$1" || grep -a . "$1"; } 2>/dev/null |
        tail -n 1 | tr -s '[:space:]' ' ' | cut -c1-150
}

# Ends the script: the plan, the sum, and a status that says whether all is well.
finish() {
    echo "1..$((passed + failed + skipped))"
    echo "$passed passed, $failed failed, $skipped skipped"
    [[ $failed = 0 && $passed -gt 0 ]] || echo "# logs: ${LOG_DIR:-none kept}"
    [[ $failed = 0 && $passed -gt 0 ]]
    exit
}
