# shellcheck shell=bash
# Shared by the client group scripts; README.md describes the variables.
# A command template may use: @D device, @G GID index, @G6 IPv6 GID index, @I device port,
# @P this case's service port, @S and @C server and client address, @S6 and @C6 the IPv6 ones.
set -u
# shellcheck source-path=SCRIPTDIR source=../tap.sh
. "$(dirname "${BASH_SOURCE[0]}")/../tap.sh"
: "${DEV:?device name}" "${GIDX:?GID index}" "${SERVER_IP:?server address}" "${CLIENT_IP:?client address}"
SERVER_WRAP=${SERVER_WRAP-} CLIENT_WRAP=${CLIENT_WRAP-}
PROBE_WRAP=${PROBE_WRAP-$SERVER_WRAP} # how to look for the server's TCP socket
SERVER_DEV=${SERVER_DEV:-$DEV} CLIENT_DEV=${CLIENT_DEV:-$DEV}
SERVER_GIDX=${SERVER_GIDX:-$GIDX} CLIENT_GIDX=${CLIENT_GIDX:-$GIDX}
SERVER_IP6=${SERVER_IP6-} CLIENT_IP6=${CLIENT_IP6-} GIDX6=${GIDX6-} IB_PORT=${IB_PORT:-1}
CASE_TIMEOUT=${CASE_TIMEOUT:-30} # seconds for one command
SETTLE=${SETTLE:-1}              # seconds given to a server that opens no TCP socket
CM_PROBE=${CM_PROBE-}            # with a port behind it: does an rdma_cm server listen on it?
LEVEL=${LEVEL:-1}                # 2 adds cases for optional features
LOG_DIR=${LOG_DIR:-$(mktemp -d)}
AGAIN=''                         # a case whose client fails with this regex in its log is tried again, 9 times at most
LOSSY=''                         # set: a case whose client timed out is tried once more
BAD=${BAD-}                      # a case whose logs match this regex has failed
NO_TCP=''                        # set where a server that listens on TCP has failed
mkdir -p "$LOG_DIR"
server_pid='' next_port=${PORT_BASE:-18600}

at_level() { [[ $LEVEL -ge $1 ]]; }
have() { command -v "$1" >/dev/null; }

expand() { # SIDE TEMPLATE: leaves the command in CMD
    local t=$2 dev=$SERVER_DEV gid=$SERVER_GIDX wrap=$SERVER_WRAP
    if [[ $1 = client ]]; then dev=$CLIENT_DEV gid=$CLIENT_GIDX wrap=$CLIENT_WRAP; fi
    t=${t//@S6/$SERVER_IP6} t=${t//@C6/$CLIENT_IP6} t=${t//@G6/$GIDX6}
    t=${t//@D/$dev} t=${t//@G/$gid} t=${t//@I/$IB_PORT} t=${t//@P/$port}
    t=${t//@S/$SERVER_IP} t=${t//@C/$CLIENT_IP}
    read -ra CMD <<<"$wrap $t"
}

# timeout makes itself the leader of a process group, so its pid names the whole group.
start_server() {
    expand server "$2"
    timeout -k 2 $((2 * CASE_TIMEOUT + 15)) "${CMD[@]}" >"$LOG_DIR/$1.server" 2>&1 </dev/null &
    server_pid=$!
}
stop_server() {
    [[ -n $server_pid ]] || return 0
    local i
    {
        kill "$server_pid"
        for ((i = 0; i < 150; i++)); do
            kill -0 -- "-$server_pid" || break
            sleep 0.02
        done
        kill -KILL -- "-$server_pid"
        wait "$server_pid"
    } 2>/dev/null
    server_pid=''
}
trap stop_server EXIT
trap 'exit 130' INT TERM

server_alive() { kill -0 "$server_pid" 2>/dev/null; }
server_exits() { # gives the server 5 s to end by itself; its status
    local i
    for ((i = 0; i < 250; i++)); do
        server_alive || { wait "$server_pid"; return; }
        sleep 0.02
    done
    return 255
}

listening() { # PORT: does a TCP socket listen on it where the server runs?
    # shellcheck disable=SC2086
    $PROBE_WRAP cat /proc/self/net/tcp /proc/self/net/tcp6 2>/dev/null |
        awk -v p="$(printf ':%04X' "$1")" '$4 == "0A" && index($2, p) == length($2) - 4 { f = 1 } END { exit !f }'
}
wait_tcp() {
    local i
    for ((i = 0; i < 200; i++)); do
        server_alive || return 1
        listening "$1" && return 0
        sleep 0.05
    done
    return 1
}

wait_cm() { # SERVER-TEMPLATE: until it listens on @P, where that can be seen
    local i
    if [[ -z $CM_PROBE || $1 != *@P* ]]; then sleep "$SETTLE"; return; fi
    for ((i = 0; i < 200; i++)); do
        # shellcheck disable=SC2086
        { $CM_PROBE "$port" || ! server_alive; } && return
        sleep 0.05
    done
}

client() { # NAME TEMPLATE
    expand client "$2"
    timeout -k 2 "$CASE_TIMEOUT" "${CMD[@]}" >"$LOG_DIR/$1.client" 2>&1 </dev/null
}

REFUSED='REJECTED, (error|status)[:= ]*8|[Cc]onnection refused'
# _try: starts the server of a pair and runs its client; status in rc.
_try() {
    start_server "$name" "$4"
    if [[ $how = tcp ]] && ! wait_tcp "$port"; then
        not_ok "$name" "server did not listen: $(last_line "$LOG_DIR/$name.server")"
        stop_server
        return
    fi
    [[ $how = tcp ]] || wait_cm "$4"
    while client "$name" "$5"; rc=$?; [[ $rc != 0 && $how = cm && $((tries -= 1)) -gt 0 ]]; do
        if ! server_alive || ! grep -qaE "$REFUSED" "$LOG_DIR/$name.client"; then break; fi
        sleep "$SETTLE" # the server was not listening yet
    done
}
# _pair WAIT(tcp|cm) ENDS(yes|no|any: the server's end after one client) NAME SERVER CLIENT [WANT]
_pair() {
    local how=$1 ends=$2 name=$3 want=${6-} rc=0 tries=5 port again
    selected "$name" || return 0
    next_port=$((next_port + 1)) port=$next_port
    if [[ "$4 $5" == *@[SC]6* && (-z $SERVER_IP6 || -z $CLIENT_IP6) ]]; then skip "$name" "no IPv6 address given"; return; fi
    if [[ "$4 $5" == *@G6* && -z $GIDX6 ]]; then skip "$name" "no GIDX6 given"; return; fi
    _try "$@"
    for ((again = 0; again < 9; again++)); do
        [[ -n $AGAIN && $rc != 0 ]] || break
        grep -qaE -- "$AGAIN" "$LOG_DIR/$name.client" || break
        stop_server
        tries=5
        _try "$@"
    done
    if [[ -n $LOSSY && $rc = 124 ]]; then
        stop_server
        echo "# $name: it timed out, and is tried once more"
        _try "$@"
    fi
    [[ -n $server_pid ]] || return # it did not listen
    if [[ -n $AGAIN && $rc != 0 && $again = 9 ]] && grep -qaE -- "$AGAIN" "$LOG_DIR/$name.client"; then
        stop_server
        skip "$name" "ten times the client asked before its own server listened"
        return
    fi
    local why=''
    if [[ $rc = 124 || $rc = 137 ]]; then
        why="client timed out after ${CASE_TIMEOUT}s: $(last_line "$LOG_DIR/$name.client")"
    elif [[ $rc != 0 ]]; then
        why="client exit $rc: $(last_line "$LOG_DIR/$name.client")"
        server_alive || why+="; server: $(last_line "$LOG_DIR/$name.server")"
    elif [[ -n $want ]] && ! grep -qaE -- "$want" "$LOG_DIR/$name.client"; then
        why="client output lacks /$want/"
    elif [[ -n $NO_TCP ]] && listening "$port"; then
        why="the server fell back to TCP"
    elif [[ $ends = yes ]]; then
        server_exits || why="server exit $?: $(last_line "$LOG_DIR/$name.server")"
    elif [[ $ends = no ]] && ! server_alive; then
        why="server ended early: $(last_line "$LOG_DIR/$name.server")"
    fi
    stop_server
    if [[ -z $why && -n $BAD ]] && grep -qaE -- "$BAD" "$LOG_DIR/$name".{server,client}; then
        why="$(grep -ahE -m1 -- "$BAD" "$LOG_DIR/$name".{server,client} | head -n 1 | cut -c1-150)"
    fi
    if [[ -z $why ]]; then ok "$name"; else not_ok "$name" "$why"; fi
}
# The server waits on TCP port @P and ends after one client.
pair() { _pair tcp yes "$@"; }
# The server waits on rdma_cm port @P and ends after one client.
cm_pair() { _pair cm yes "$@"; }
# As those two, but the server goes on and is stopped.
daemon_pair() { _pair tcp no "$@"; }
cm_daemon_pair() { _pair cm no "$@"; }
# As cm_pair, but the server may end or go on.
cm_any_pair() { _pair cm any "$@"; }

# one NAME COMMAND WANT: one command beside the server's device, whose output must match WANT.
one() {
    local port=0 rc
    selected "$1" || return 0
    expand server "$2"
    timeout -k 2 "$CASE_TIMEOUT" "${CMD[@]}" >"$LOG_DIR/$1.server" 2>&1 </dev/null
    rc=$?
    if [[ $rc != 0 ]]; then
        not_ok "$1" "exit $rc: $(last_line "$LOG_DIR/$1.server")"
    elif grep -qaE -- "$3" "$LOG_DIR/$1.server"; then
        ok "$1"
    else
        not_ok "$1" "output lacks /$3/"
    fi
}

# The active path MTU in bytes; 4096 where it can't be read, so that no case is skipped for it.
active_mtu() {
    local port=0 n
    expand server "ibv_devinfo -d @D -i @I"
    n=$(timeout -k 2 10 "${CMD[@]}" 2>/dev/null | awk '/active_mtu:/ { print $2; exit }')
    echo "${n:-4096}"
}
