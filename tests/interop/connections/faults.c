/* Cases of programs and daemons that die, of messages that are lost, and of answers that take their time. */
#include "connections.h"
#include <errno.h>
#include <signal.h>
#include <unistd.h>

/* The refusal is lost, so the same request comes again. The kernel's listener sees it as a new one; Ferroce answers it
 * without asking again. */
static void lost_refusal_active(struct session *s)
{
    reject_active(s);
    sync_peer(s);
}

static void lost_refusal_passive(struct session *s)
{
    int requests = 0;
    listen_here(s, 8);
    do {
        if (!event_waits(s))
            continue;
        take_request(s);
        ZERO(rdma_reject(s->id, private_bytes(), (uint8_t)current->number));
        ZERO(rdma_destroy_id(s->id));
        s->id = NULL;
        requests++;
    } while (!peer_speaks(s));
    MUST(requests == 1 || requests == 2, "%d requests, not 1 or 2", requests);
    sync_peer(s);
}

/* More requests than the listener lets wait: what comes then has no answer, and comes again later. */
static void backlog_active(struct session *s)
{
    struct rdma_conn_param param = parameters(0);
    struct rdma_cm_id *ids[3];
    uint16_t port = (uint16_t)hear(s);
    for (int i = 0; i < 3; i++) {
        resolve_to(s, port);
        ids[i] = s->id;
        make_qp(s);
        ZERO(rdma_connect(s->id, &param));
    }
    expect_none(s, 500);
    sync_peer(s);
    for (int i = 0; i < 3; i++) {
        expect(s, RDMA_CM_EVENT_REJECTED, CONSUMER);
        MUST(s->event.id == ids[i], "they are not refused in their order");
        expect_private(s, REJ_ROOM, i + 1);
    }
    for (int i = 0; i < 2; i++) {
        rdma_destroy_qp(ids[i]);
        ZERO(rdma_destroy_id(ids[i]));
    }
}

static void backlog_passive(struct session *s)
{
    listen_here(s, 2);
    sync_peer(s);
    for (int i = 0; i < 3; i++) {
        take_request(s);
        ZERO(rdma_reject(s->id, private_bytes(), (uint8_t)(i + 1)));
        ZERO(rdma_destroy_id(s->id));
    }
    s->id = NULL;
}

/* One side is killed in the middle: the kernel, or the daemon, ends for it what it had. */
static void die_here(void)
{
    kill(getpid(), SIGKILL);
}

static void death_connected_active(struct session *s)
{
    connect_with(s, 0, 0);
    exchange(s);
    sync_peer(s);
    if (current->who_dies)
        die_here();
    expect(s, RDMA_CM_EVENT_DISCONNECTED, 0);
    rdma_disconnect(s->id);
}

static void death_connected_passive(struct session *s)
{
    accept_with(s, 0, 0);
    exchange(s);
    expect(s, RDMA_CM_EVENT_ESTABLISHED, 0);
    sync_peer(s);
    if (!current->who_dies)
        die_here();
    expect(s, RDMA_CM_EVENT_DISCONNECTED, 0);
    rdma_disconnect(s->id);
}

static void death_requested_active(struct session *s)
{
    struct rdma_conn_param param = parameters(0);
    resolve(s);
    make_qp(s);
    ZERO(rdma_connect(s->id, &param));
    sync_peer(s);
    if (current->who_dies)
        die_here();
    expect(s, RDMA_CM_EVENT_REJECTED, CONSUMER);
}

static void death_requested_passive(struct session *s)
{
    listen_here(s, 8);
    take_request(s);
    sync_peer(s);
    if (!current->who_dies)
        die_here();
    expect_none(s, 300);
    MUST(rdma_reject(s->id, NULL, 0) && errno == EINVAL, "a request that was withdrawn is rejected: %s", strerror(errno));
}

static void death_replied_active(struct session *s)
{
    struct rdma_conn_param param = parameters(0);
    resolve(s);
    make_qp_apart(s);
    param.qp_num = s->apart->qp_num;
    ZERO(rdma_connect(s->id, &param));
    expect(s, RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
    sync_peer(s);
    if (current->who_dies)
        die_here();
    expect(s, RDMA_CM_EVENT_REJECTED, CONSUMER);
}

static void death_replied_passive(struct session *s)
{
    accept_with(s, 0, 0);
    sync_peer(s);
    if (!current->who_dies)
        die_here();
    expect(s, RDMA_CM_EVENT_REJECTED, CONSUMER);
}

/* The daemon of one side is killed, and another one starts: both sides go on as if nothing had been. Where the environment
 * does not say how that is done, there is no daemon. */
static void new_daemon(struct session *s)
{
    const char *command = getenv("NEW_DAEMON");
    sync_peer(s);
    MUST(!command || system(command) == 0, "%s fails", command);
    sync_peer(s);
}

static void daemon_connected_active(struct session *s)
{
    connect_with(s, 0, 0);
    exchange(s);
    new_daemon(s);
    exchange(s);
    sync_peer(s);
    part(s);
}

static void daemon_connected_passive(struct session *s)
{
    accept_with(s, 0, 0);
    exchange(s);
    expect(s, RDMA_CM_EVENT_ESTABLISHED, 0);
    new_daemon(s);
    exchange(s);
    sync_peer(s);
    part(s);
}

static void daemon_requested_active(struct session *s)
{
    struct rdma_conn_param param = parameters(7);
    resolve(s);
    make_qp(s);
    ZERO(rdma_connect(s->id, &param));
    new_daemon(s);
    expect(s, RDMA_CM_EVENT_ESTABLISHED, 0);
    expect_private(s, REP_ROOM, 9);
    use_and_part(s);
}

static void daemon_requested_passive(struct session *s)
{
    struct rdma_conn_param param = parameters(9);
    listen_here(s, 8);
    take_request(s);
    expect_private(s, REQ_ROOM, 7);
    make_qp(s);
    new_daemon(s);
    ZERO(rdma_accept(s->id, &param));
    use_and_part(s);
}

static void daemon_listening_active(struct session *s)
{
    struct rdma_conn_param param = parameters(0);
    resolve(s);
    make_qp(s);
    new_daemon(s);
    ZERO(rdma_connect(s->id, &param));
    expect(s, RDMA_CM_EVENT_ESTABLISHED, 0);
    use_and_part(s);
}

static void daemon_listening_passive(struct session *s)
{
    struct rdma_conn_param param = parameters(0);
    listen_here(s, 8);
    new_daemon(s);
    take_request(s);
    make_qp(s);
    ZERO(rdma_accept(s->id, &param));
    use_and_part(s);
}

/* An answer that was lost is asked for again, and the kernel's listener has a second request then. */
static void sidr_again_passive(struct session *s)
{
    struct rdma_conn_param param = parameters(0);
    datagrams_accept(s, 0, current->number);
    param.qp_num = s->id->qp->qp_num;
    struct rdma_cm_id *first = s->id;
    while (!arrived(s))
        if (event_waits(s)) {
            take_request(s);
            ZERO(rdma_accept(s->id, &param));
            ZERO(rdma_destroy_id(s->id));
            s->id = first;
        }
    exchange(s);
}

/* Where nobody answers: the network drops one kind of message, always. */
static void silent_request_active(struct session *s)
{
    struct rdma_conn_param param = parameters(0);
    resolve(s);
    make_qp(s);
    ZERO(rdma_connect(s->id, &param));
    expect(s, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT);
    sync_peer(s);
}

static void silent_request_passive(struct session *s)
{
    listen_here(s, 8);
    sync_peer(s); /* and no request came: it would have an id that is destroyed here */
}

/* The passive side gives up a little earlier or later. If earlier, the next request finds no listener any more. */
static void silent_reply_active(struct session *s)
{
    struct rdma_conn_param param = parameters(0);
    resolve(s);
    make_qp(s);
    ZERO(rdma_connect(s->id, &param));
    expect_either(s, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT, RDMA_CM_EVENT_REJECTED, NO_LISTENER);
    sync_peer(s);
}

static void silent_reply_passive(struct session *s)
{
    accept_with(s, 0, 0);
    ZERO(rdma_destroy_id(s->listener));
    s->listener = NULL;
    expect(s, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT);
    sync_peer(s);
}

static void silent_ready_active(struct session *s)
{
    connect_with(s, 0, 0);
    sync_peer(s);
}

static void silent_disconnect_active(struct session *s)
{
    connect_with(s, 0, 0);
    exchange(s);
    sync_peer(s);
    ZERO(rdma_disconnect(s->id));
    expect(s, RDMA_CM_EVENT_DISCONNECTED, -ETIMEDOUT);
    sync_peer(s);
}

static void silent_disconnect_passive(struct session *s)
{
    accept_with(s, 0, 0);
    exchange(s);
    expect(s, RDMA_CM_EVENT_ESTABLISHED, 0);
    sync_peer(s);
    sync_peer(s);
}

/* It takes its time, longer than the peer waits for an answer. */
static void late_accept_passive(struct session *s)
{
    struct rdma_conn_param param = parameters(0);
    listen_here(s, 8);
    take_request(s);
    make_qp(s);
    sleep(9);
    ZERO(rdma_accept(s->id, &param));
    use_and_part(s);
}

const struct test fault_tests[] = {
    {"death/connected-active", death_connected_active, death_connected_passive, .deadly = true, .who_dies = true},
    {"death/connected-passive", death_connected_active, death_connected_passive, .deadly = true},
    {"death/requested-active", death_requested_active, death_requested_passive, .deadly = true, .who_dies = true},
    {"death/requested-passive", death_requested_active, death_requested_passive, .deadly = true},
    {"death/replied-active", death_replied_active, death_replied_passive, .deadly = true, .who_dies = true},
    {"death/replied-passive", death_replied_active, death_replied_passive, .deadly = true},
    {"after-deaths", request_active, request_passive, 0},
    /* For a network that drops messages, but for the last two. */
    {"slow/connect", request_active, request_passive, 0},
    {"slow/reject", lost_refusal_active, lost_refusal_passive, 33},
    {"slow/sidr", sidr_request_active, sidr_again_passive, 7},
    {"slow/backlog", backlog_active, backlog_passive, 0},
    {"slow/late-accept", request_active, late_accept_passive, 0},
    {"service/connected", daemon_connected_active, daemon_connected_passive, 0},
    {"service/requested", daemon_requested_active, daemon_requested_passive, 0},
    {"service/listening", daemon_listening_active, daemon_listening_passive, 0},
    {"silent/REQ", silent_request_active, silent_request_passive, 0},
    {"silent/REP", silent_reply_active, silent_reply_passive, 0},
    {"silent/RTU", silent_ready_active, silent_reply_passive, 0},
    {"silent/DREQ", silent_disconnect_active, silent_disconnect_passive, 0},
    {0},
};
