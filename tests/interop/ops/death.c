/* A process is killed in the middle of a stream of messages: what the other side sees. */
#include "ops.h"
#include <signal.h>
#include <unistd.h>

enum { LENGTH = 32768, WINDOW = 16, ENOUGH = 40 };

/* Sends until the end: of this process, or of the peer. */
static void stream(struct session *s, struct pair *pair, bool victim)
{
    struct ibv_sge from = entry(&s->out, 0, LENGTH);
    struct ibv_send_wr wr = {.sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
    struct ibv_wc wc;
    uint64_t posted = 0, done = 0;
    double last = now();
    for (;;) {
        while (posted < done + WINDOW) {
            wr.wr_id = posted++;
            post(s, pair, &wr);
        }
        next_completion(s, pair->send_cq, &wc);
        if (wc.status != IBV_WC_SUCCESS)
            break;
        MUST(wc.wr_id == done, "completion %lu, not %lu", (unsigned long)wc.wr_id, (unsigned long)done);
        last = now(), done++;
        if (victim && done == ENOUGH)
            kill(getpid(), SIGKILL);
    }
    MUST(wc.status == IBV_WC_RETRY_EXC_ERR && wc.wr_id == done, "completion %lu with \"%s\", not %lu", (unsigned long)wc.wr_id,
        ibv_wc_status_str(wc.status), (unsigned long)done);
    MUST(now() - last < 10, "it takes %.1f s to give up", now() - last);
    MUST(done >= ENOUGH - WINDOW, "only %lu messages were acknowledged", (unsigned long)done);
    for (done++; done < posted; done++)
        expect_status(s, pair, pair->send_cq, done, IBV_WC_WR_FLUSH_ERR);
    MUST(state_of(s, pair->qp) == IBV_QPS_ERR, "state %d, not ERR", state_of(s, pair->qp));
}

/* Receives until the end. A responder does not notice that of its peer. */
static void sink(struct session *s, struct pair *pair, bool victim)
{
    struct ibv_wc wc;
    uint64_t done = 0;
    for (double last = now(); now() - last < 1.5;) {
        if (!try_completion(s, pair->recv_cq, &wc))
            continue;
        check_completion(s, pair, &wc, &(struct expected){.wr_id = done++, .opcode = IBV_WC_RECV, .length = LENGTH, .source = ANY});
        struct ibv_sge place = entry(&s->in, (done % WINDOW) * LENGTH, LENGTH);
        post_receive(s, pair, done + 2 * WINDOW - 1, &place, 1);
        last = now();
        if (victim && done == ENOUGH)
            kill(getpid(), SIGKILL);
    }
    MUST(done >= ENOUGH, "only %lu messages came", (unsigned long)done);
    MUST(state_of(s, pair->qp) == IBV_QPS_RTS, "state %d, not RTS", state_of(s, pair->qp));
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
    MUST(!ibv_modify_qp(pair->qp, &attr, IBV_QP_STATE), "to ERR");
    /* A message may have begun: rxe keeps the receive it has taken, and it is flushed as well. */
    for (int i = 0; i < 2 * WINDOW; i++)
        expect_status(s, pair, pair->recv_cq, done++, IBV_WC_WR_FLUSH_ERR);
}

void stream_until_death(struct session *s, bool victim)
{
    struct options options = defaults(s, IBV_QPT_RC);
    options.timeout = 14, options.retry = 3;
    struct pair *pair = make_pair(s, &options);
    if (!s->requester)
        for (size_t i = 0; i < 2 * WINDOW; i++) {
            struct ibv_sge place = entry(&s->in, (i % WINDOW) * LENGTH, LENGTH);
            post_receive(s, pair, i, &place, 1);
        }
    sync_peer(s);
    if (s->requester)
        stream(s, pair, victim);
    else
        sink(s, pair, victim);
    MUST(!victim, "it outlives its death");
}
