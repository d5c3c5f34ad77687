# shellcheck shell=bash
# Sourced after lib.sh by the scripts of XDP mode: an ordinary user, daemons of root's, interfaces in XDP mode.
# In namespaces a and b (make_veth) programs run as that user, by `as_user SIDE` and `run_in SIDE`.

if [[ $(awk '{ print $1, $2, $3; exit }' /proc/self/uid_map) != '0 0 4294967295' || $EUID != 0 ]]; then
    echo 'XDP mode needs root of the host, which this is not'
    exit 77
fi
NOBODY=65534
DEVICE=ferroce_eth0
user="setpriv --reuid $NOBODY --regid $NOBODY --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs"

# user_copy [FILE...]: a copy of the programs, and of these files, where the user can go: in COPY.
user_copy() {
    COPY=$(mktemp -d)
    at_end "rm -rf $COPY"
    cp -r "$BIN"/{ferroce,ferroced,lib} "$E2E/cm-listens" "$@" "$COPY"
    chmod -R a+rX "$COPY"
    export FERROCE=$COPY/ferroce
}
as_user() { echo "ip netns exec $1 $user"; }
run_in() { echo "$(as_user "$1") $COPY/ferroce run --"; }

# As root, in a namespace: the command-line tool.
ferroce_in() { ip netns exec "$1" "$BIN/ferroce" "${@:2}"; }
answers_in() { ferroce_in "$1" status >/dev/null; }

# daemon_in SIDE [OPTION...]: a daemon of root's that serves the user; its id in daemon[SIDE].
declare -A daemon=()
daemon_in() {
    # shellcheck disable=SC2153
    start "ferroced-$1" ip netns exec "$1" "$FERROCED" --group "$NOBODY" "${@:2}"
    # shellcheck disable=SC2034
    daemon[$1]=$PID
    until_true 10 answers_in "$1"
}

# xdp_on SIDE [WORD...]: puts eth0 there (or INTERFACE) into XDP mode; what went wrong in WHY.
xdp_on() {
    WHY=$(ferroce_in "$1" link add "ferroce_${INTERFACE:-eth0}" netdev "${INTERFACE:-eth0}" mode xdp "${@:2}" 2>&1)
}
xdp_off() { WHY=$(ferroce_in "$1" link del "${2:-$DEVICE}" 2>&1); }
mode_of() { # SIDE [DEVICE]
    ferroce_in "$1" link show "${2:-$DEVICE}" --json | grep -o '"mode": *"[a-z]*"' | cut -d'"' -f4
}
is_mode() { [[ $(mode_of "$1" "${3-}") = "$2" ]]; }

# both_in_xdp [WORD...]: ends the script where it can't be.
both_in_xdp() {
    local side
    for side in a b; do
        xdp_on "$side" "$@" || { not_ok "xdp-mode-$side" "$WHY"; finish; }
    done
}

# UDP datagrams that a namespace's own stack has sent and received, or had no socket for.
datagrams() {
    ip netns exec "$1" cat /proc/net/snmp /proc/net/snmp6 |
        awk '$1 == "Udp:" && $2 ~ /^[0-9]/ { n += $2 + $3 + $5 } /^Udp6(In|Out)Datagrams|^Udp6NoPorts/ { n += $2 } END { print n + 0 }'
}
# Packets that an interface has received.
arrivals() { ip netns exec "$1" cat "/sys/class/net/${2:-eth0}/statistics/rx_packets"; }

# watch_sockets: remembers the counters of both sides. by_xdp PACKETS: since then at least so many packets have arrived on
# each side, and few of them by the kernel's sockets (the first ones, until the next hop is known); otherwise the reason is in WHY.
declare -A seen=()
watch_sockets() {
    local side
    for side in a b; do seen[$side]=$(datagrams "$side") seen[$side-in]=$(arrivals "$side" "${INTERFACE:-eth0}"); done
}
by_xdp() {
    local side sockets packets
    WHY=''
    for side in a b; do
        sockets=$(($(datagrams "$side") - seen[$side])) packets=$(($(arrivals "$side" "${INTERFACE:-eth0}") - seen[$side-in]))
        ((packets >= $1)) || WHY+=" only $packets packets came to $side;"
        ((sockets <= $1 / 4)) || WHY+=" $sockets datagrams went by sockets of $side;"
    done
    [[ -z $WHY ]]
}

# pairs NAME SERVER-SIDE CLIENT-SIDE SERVER-IP COMMAND...: a server and a client of each command, all at once; what went
# wrong in WHY.
next_port=17000
pairs() {
    local name=$1 server_wrap client_wrap ip=$4 command words i rc server_side=$2
    local ports=() servers=() clients=()
    server_wrap=$(run_in "$2") client_wrap=$(run_in "$3")
    shift 4
    WHY=''
    for command in "$@"; do
        ports+=($((next_port += 1)))
        read -ra words <<<"$server_wrap $command -p $next_port"
        start "$name-$next_port.server" "${words[@]}"
        servers+=("$PID")
    done
    for i in "${ports[@]}"; do until_true 20 tcp_listens "$i" "$server_side" || WHY+=" the server at $i does not listen;"; done
    i=0
    for command in "$@"; do
        read -ra words <<<"$client_wrap $command -p ${ports[i]} $ip"
        start "$name-${ports[i]}.client" "${words[@]}"
        clients+=("$PID")
        i=$((i + 1))
    done
    for i in "${!clients[@]}"; do
        rc=0; await "${clients[i]}" || rc=$?
        ((rc == 0)) || WHY+=" client exit $rc: $(last_line "$LOG_DIR/$name-${ports[i]}.client");"
        rc=0; await "${servers[i]}" 20 || rc=$?
        ((rc == 0)) || WHY+=" server exit $rc: $(last_line "$LOG_DIR/$name-${ports[i]}.server");"
    done
    ! grep -q 'invalid data' "$LOG_DIR/$name"-* || WHY+=' invalid data;'
    [[ -z $WHY ]]
}

# judge NAME WHY: the line of a case.
judge() { if [[ -z $2 ]]; then ok "$1"; else not_ok "$1" "${2:0:300}"; fi; }
