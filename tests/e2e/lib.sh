# shellcheck shell=bash
# Sourced by the end-to-end scripts: where the programs are, how they are started, awaited and ended.
#   BIN      folder of ferroce and ferroced (target/release)
#   LOG_DIR  where logs go, a folder for each script
set -u
PATH=$PATH:/usr/sbin:/sbin
: "${BIN:?folder of ferroce and ferroced}"
E2E=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
TESTS=${E2E%/*}
# shellcheck source-path=SCRIPTDIR source=../tap.sh
. "$TESTS/tap.sh"
export FERROCE=$BIN/ferroce
FERROCED=$BIN/ferroced
# shellcheck disable=SC2034
RUN="$FERROCE run --"
LOG_DIR=${LOG_DIR:-$(mktemp -d)}
mkdir -p "$LOG_DIR"
TIMEOUT=${TIMEOUT:-60} # seconds for one command
SHARDS=${SHARDS:-3}    # parts of a group of real programs that run at once
export CASE_TIMEOUT=${CASE_TIMEOUT:-90} TEST_TIMEOUT=${TEST_TIMEOUT:-90} # for theirs: ends what hangs, on a busy machine too

# What this script started and has not awaited: ended, each by its id, when the script ends.
declare -A started=()
cleanups=()
cleanup() {
    local pid command
    for pid in "${!started[@]}"; do kill -KILL "$pid"; done
    for command in "${cleanups[@]}"; do eval "$command"; done
} 2>/dev/null
trap cleanup EXIT
trap 'exit 130' INT TERM
at_end() { cleanups=("$1" "${cleanups[@]}"); }

# start LOG COMMAND...: in the background, output to LOG_DIR/LOG; its id in PID.
start() {
    local log=$1
    shift
    "$@" >"$LOG_DIR/$log" 2>&1 </dev/null &
    PID=$!
    started[$PID]=1
}

# until_true SECONDS COMMAND...: runs it again until it succeeds; fails when the time is over.
until_true() {
    local end=$((SECONDS + $1))
    shift
    until "$@" 2>/dev/null; do
        ((SECONDS <= end)) || return 1
        sleep 0.02
    done
}
ended() { ! kill -0 "$1" 2>/dev/null; }

# await PID [SECONDS]: the status of something started; 124 (and it is killed) when it does not end in time.
await() {
    local rc=0
    unset "started[$1]"
    if ! until_true "${2:-$TIMEOUT}" ended "$1"; then
        kill -KILL "$1"
        wait "$1"
        return 124
    fi 2>/dev/null
    wait "$1" || rc=$?
    return "$rc"
}

# Does a TCP socket listen on PORT (in the namespace NETNS)?
tcp_listens() {
    local prefix=()
    [[ -z ${2-} ]] || prefix=(ip netns exec "$2")
    "${prefix[@]}" cat /proc/self/net/tcp /proc/self/net/tcp6 2>/dev/null |
        grep -qE "^ *[0-9]+: [0-9A-F]+:$(printf %04X "$1") .* 0A "
}

# start_daemon [OPTION...]: ferroced by hand, ready when this returns; its id in DAEMON.
start_daemon() {
    start "ferroced" "$FERROCED" "$@"
    # shellcheck disable=SC2034
    DAEMON=$PID
    until_true 10 daemon_answers
}
daemon_answers() { "$FERROCE" status >/dev/null 2>&1; }
no_daemon() { ! grep -q '@ferroced$' /proc/self/net/unix; }

# How many slots are leased, as the daemon says.
AS=() # put before what is to be another user's, or in another namespace
leased() { "${AS[@]}" "$FERROCE" status --json | grep -o '"leased": *[0-9]*' | grep -o '[0-9]*$'; }
none_runs() { ! grep -sq '^ferroce' /proc/[0-9]*/comm; }
none_leased() { [[ $(leased) = 0 ]]; }

# nothing_left NAME: a case: all leases come back, the daemon started on demand leaves by itself, and so does its tree.
nothing_left() {
    local left
    if ! no_daemon && ! until_true 10 none_leased; then
        not_ok "$1" "leases left: $("${AS[@]}" "$FERROCE" status 2>&1 | tr '\n' ';' | cut -c1-150)"
    elif ! until_true 60 no_daemon; then # what RDMA CM refused stays known for some 20 s, and more as the timeouts are
        not_ok "$1" 'the daemon does not leave'
    elif left=$(ls -d /run/ferroce/* /tmp/ferroce-*-"$(stat -Lc %i /proc/self/ns/net)" 2>/dev/null); [[ -n $left ]]; then
        not_ok "$1" "left: $left"
    elif ! until_true 10 none_runs; then # its socket goes just before it does
        not_ok "$1" "left running: $(grep -sl '^ferroce' /proc/[0-9]*/comm)"
    else
        ok "$1"
    fi
}

# compile PROGRAM: one of tests/c into LOG_DIR; ends the script when it does not compile.
compile() {
    local flags=(-O1 -Wall -Wextra -o "$LOG_DIR/$1")
    [[ $1 != *.so ]] || flags+=(-shared -fPIC)
    "${CC:-gcc}" "${flags[@]}" "$TESTS/c/${1%.so}.c" -Wl,--as-needed -lrdmacm -libverbs -lpthread -ldl || { not_ok "compile-$1" 'it does not'; finish; }
}

# compile_against LIBRARY OUTPUT SOURCE [OPTION...]: SOURCE of tests/c into LOG_DIR, with the libibverbs LOG_DIR/LIBRARY.
compile_against() {
    local library=$1 output=$2 source=$3
    shift 3
    "${CC:-gcc}" -O1 -Wall -Wextra -o "$LOG_DIR/$output" "$@" "$TESTS/c/$source.c" -L"$LOG_DIR" "-l:$library" \
        -Wl,-rpath,"$LOG_DIR" -Wl,--unresolved-symbols=ignore-in-shared-libs -lpthread || { not_ok "compile-$output" 'it does not'; finish; }
}

# bundle NAME [LIBIBVERBS]: a copy of libibverbs (this machine's) under a name that tells nothing, as LOG_DIR/libNAME.so, and
# with it LOG_DIR/NAME-plugin.so. It has that name inside, too, or it is the same library to the dynamic linker: 9 letters.
bundle() {
    local real=${2-}
    [[ -n $real ]] || real=$(ldconfig -p | awk '/libibverbs\.so\.1 /{ print $NF; exit }')
    sed "s/libibverbs\\.so\\.1\\x00/lib$1.so\\x00/g" "$(readlink -f "$real")" >"$LOG_DIR/lib$1.so"
    compile_against "lib$1.so" "$1-plugin.so" plugin -shared -fPIC
}

# program NAME COMMAND...: a case: the command, under ferroce run, ends with status 0.
program() {
    local name=$1 rc=0
    shift
    selected "$name" || return 0
    start "$name.log" "${AS[@]}" "$FERROCE" run -- "$@"
    await "$PID" || rc=$?
    if ((rc == 0)); then ok "$name"; else not_ok "$name" "exit $rc: $(last_line "$LOG_DIR/$name.log")"; fi
}

# run_client_group SCRIPT NAME [VARIABLE=VALUE...]: one of tests/clients as a part of this script; its lines are counted.
# SHARDS of it run at once, each with its share of the cases and ports of its own: those of the group before may linger, as
# TCP's do. A case may skip for an MTU that the interface lacks, and a
# test of pyverbs where pyverbs.expect permits it; another skip is a failure, and so is a group without a case.
group_ports=18600
run_client_group() {
    local script=$1 name=$2 line shard ended=0 before=$((passed + failed + skipped)) ports=$group_ports
    shift 2
    group_ports=$((ports + SHARDS * 300 < 31000 ? ports + SHARDS * 300 : 18600))
    while IFS= read -r line; do
        case $line in
            'ok '*'# SKIP'*)
                if [[ $script = pyverbs || $line = *'active MTU is'* || $line = *'before its own server listened' ]]; then
                    skipped=$((skipped + 1))
                else
                    failed=$((failed + 1))
                    line="not $line"
                fi
                ;;
            'ok '*) passed=$((passed + 1)) ;;
            'not ok '*) failed=$((failed + 1)) ;;
            '#'*) ;;
            1..*) continue ;;
            *' passed, '*) ended=$((ended + 1)); continue ;;
        esac
        printf '%s\n' "$line"
    done < <(
        for ((shard = 0; shard < SHARDS; shard++)); do
            env GROUP="$GROUP/$name" LOG_DIR="$LOG_DIR/$name" SHARD="$shard/$SHARDS" PORT_BASE=$((ports + shard * 300)) \
                CM_PROBE="${CM_PROBE-$E2E/cm-listens}" PYVERBS_PACKAGE="${BIN%/*}/pyverbs" "$@" "$TESTS/clients/$script" 2>&1 &
        done
        wait
    )
    ((ended == SHARDS)) || not_ok "$name/$script" "$((SHARDS - ended)) of its $SHARDS parts did not end"
    [[ $ONLY != . ]] || ((passed + failed + skipped > before)) || not_ok "$name/$script" 'it has no cases'
}

# make_veth: namespaces a and b, joined by eth0 on both sides, with addresses 10.9.0.1 and .2, fd09::1 and ::2.
make_veth() {
    ip netns add a && ip netns add b || exit
    local side
    for side in a b; do
        if [[ -d /proc/sys/net/ipv6 ]]; then
            ip netns exec "$side" bash -c 'echo 0 | tee /proc/sys/net/ipv6/conf/{all,default}/accept_dad' >/dev/null
        fi
    done
    ip link add eth0 netns a type veth peer name eth0 netns b || exit
    ip -n a addr add 10.9.0.1/24 dev eth0 && ip -n b addr add 10.9.0.2/24 dev eth0
    ip -n a addr add fd09::1/64 dev eth0 nodad && ip -n b addr add fd09::2/64 dev eth0 nodad
    for side in a b; do ip -n "$side" link set lo up && ip -n "$side" link set eth0 up; done
    for side in a b; do until_true 10 has_link_local "$side" || echo "# no link-local address in $side"; done
}
# has_link_local NAMESPACE [INTERFACE]
has_link_local() { ip -n "$1" -6 addr show dev "${2:-eth0}" scope link | grep inet6 | grep -qv tentative; }

set_mtu() {
    ip -n a link set eth0 mtu "$1" && ip -n b link set eth0 mtu "$1"
}
