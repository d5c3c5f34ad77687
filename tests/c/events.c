/* events CASE: every asynchronous event, once and where it belongs. The cases port, gid and removed change the interface
 * NETDEV of the device DEV by ip(8). */
#include "verbs_any.h"

static struct ibv_context *context;
static struct ibv_pd *pd;

/* Reads and acknowledges the next event, which must be this one. */
static void expect(struct ibv_context *from, enum ibv_event_type type, void *element)
{
    struct ibv_async_event event = next_event(from);
    CHECK(event.event_type == type, "%s, not %s", ibv_event_type_str(event.event_type), ibv_event_type_str(type));
    CHECK(!element || event.element.qp == element, "%s of another object", ibv_event_type_str(type));
    ibv_ack_async_event(&event);
}

static void quiet(struct ibv_context *of) { CHECK(!readable(of->async_fd, 0), "an event too many"); }

static void ip(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void ip(const char *format, ...)
{
    char command[200] = "ip ";
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command + 3, sizeof(command) - 3, format, arguments);
    va_end(arguments);
    CHECK(system(command) == 0, "%s failed", command);
}

static const char *netdev(void)
{
    CHECK(getenv("NETDEV"), "NETDEV is not set");
    return getenv("NETDEV");
}

/* The first packet at a QP in RTR; only its own context is told. */
static void established(void)
{
    struct ibv_context *other = open_device();
    struct any two[2];
    for (int i = 0; i < 2; i++)
        two[i] = make_any(context, pd, IBV_QPT_RC);
    take_to(&two[0], IBV_QPS_RTS, good_attr(context, two[1].qp->qp_num));
    take_to(&two[1], IBV_QPS_RTR, good_attr(context, two[0].qp->qp_num));
    struct ibv_sge sge = piece(&two[0], 0, 8);
    for (int i = 0; i < 2; i++) {
        FAILS(receive_one(&two[1], i, piece(&two[1], 0, 8)), 0);
        FAILS(post_one(&two[0], &sge, (struct ibv_send_wr){.opcode = IBV_WR_SEND}), 0);
        CHECK(next_wc(two[0].send_cq).status == IBV_WC_SUCCESS, "RTR does not receive");
    }
    expect(context, IBV_EVENT_COMM_EST, two[1].qp);
    quiet(context);
    quiet(other);
    FAILS(ibv_close_device(other), 0);
    destroy_any(&two[0]);
    destroy_any(&two[1]);
}

/* Nothing to read, and a program that does not want to wait. */
static void nonblocking(void)
{
    struct ibv_async_event event;
    FAILS(fcntl(context->async_fd, F_SETFL, O_NONBLOCK), 0);
    errno = 0;
    CHECK(ibv_get_async_event(context, &event) == -1 && errno == EAGAIN, "get_async_event: %s", strerror(errno));
}

static struct ibv_qp *on_cq(struct ibv_cq *cq)
{
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
        .cap = {.max_recv_wr = 8, .max_recv_sge = 1, .max_send_wr = 1, .max_send_sge = 1}};
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    CHECK(qp, "create_qp: %s", strerror(errno));
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    FAILS(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
    return qp;
}

/* A CQ without room fails, and its QPs with it; one that may overrun keeps the newest. */
static void overrun(void)
{
    struct ibv_cq *cq = ibv_create_cq(context, 2, NULL, NULL, 0);
    CHECK(cq, "create_cq: %s", strerror(errno));
    CHECK(cq->cqe == 2, "this test counts on the size it asks for");
    struct ibv_qp *qp[2] = {on_cq(cq), on_cq(cq)};
    struct ibv_recv_wr *bad, wr = {0};
    for (int i = 0; i < 3; i++) {
        wr.wr_id = i;
        FAILS(ibv_post_recv(qp[0], &wr, &bad), 0);
    }
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
    FAILS(ibv_modify_qp(qp[0], &attr, IBV_QP_STATE), 0);
    expect(context, IBV_EVENT_CQ_ERR, cq);
    struct ibv_async_event fatal[2] = {next_event(context), next_event(context)};
    for (int i = 0; i < 2; i++) {
        CHECK(fatal[i].event_type == IBV_EVENT_QP_FATAL, "%s", ibv_event_type_str(fatal[i].event_type));
        CHECK(fatal[i].element.qp == qp[0] || fatal[i].element.qp == qp[1], "another QP");
    }
    CHECK(fatal[0].element.qp != fatal[1].element.qp, "one QP is told twice");
    quiet(context);
    struct ibv_qp_init_attr made;
    FAILS(ibv_query_qp(qp[1], &attr, IBV_QP_STATE, &made), 0);
    CHECK(attr.qp_state == IBV_QPS_ERR, "the QP is in state %d", attr.qp_state);
    for (int i = 0; i < 2; i++) {
        struct ibv_wc wc = next_wc(cq);
        CHECK(wc.wr_id == (uint64_t)i && wc.status == IBV_WC_WR_FLUSH_ERR, "what came before");
    }
    FAILS(ibv_post_recv(qp[1], &wr, &bad), 0);
    struct ibv_wc wc;
    CHECK(ibv_poll_cq(cq, 1, &wc) == 0, "a CQ that failed takes completions");
    FAILS(ibv_resize_cq(cq, 10), EINVAL);
    for (int i = 0; i < 2; i++) {
        ibv_ack_async_event(&fatal[i]);
        FAILS(ibv_destroy_qp(qp[i]), 0);
    }
    FAILS(ibv_destroy_cq(cq), 0);

    struct ibv_cq_init_attr_ex ex = {.cqe = 2, .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS, .flags = IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN};
    cq = ibv_cq_ex_to_cq(ibv_create_cq_ex(context, &ex));
    CHECK(cq, "create_cq_ex: %s", strerror(errno));
    qp[0] = on_cq(cq);
    attr.qp_state = IBV_QPS_ERR;
    FAILS(ibv_modify_qp(qp[0], &attr, IBV_QP_STATE), 0);
    for (int i = 0; i < 5; i++) {
        wr.wr_id = i;
        FAILS(ibv_post_recv(qp[0], &wr, &bad), 0);
    }
    CHECK(next_wc(cq).wr_id == 3 && next_wc(cq).wr_id == 4, "the newest completions");
    quiet(context);
    FAILS(ibv_destroy_qp(qp[0]), 0);
    FAILS(ibv_destroy_cq(cq), 0);
}

/* The limit of an SRQ: once for each time that it is set; and the last receive of a QP. */
static void shared_receives(void)
{
    struct any from = make_any(context, pd, IBV_QPT_RC), to = make_any(context, pd, IBV_QPT_RC);
    struct ibv_srq_init_attr srq_init = {.attr = {.max_wr = 16, .max_sge = 1}};
    to.srq = ibv_create_srq(pd, &srq_init);
    CHECK(to.srq, "create_srq: %s", strerror(errno));
    FAILS(ibv_destroy_qp(to.qp), 0);
    struct ibv_qp_init_attr init = {.send_cq = to.send_cq, .recv_cq = to.recv_cq, .srq = to.srq, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 4, .max_send_sge = 1, .max_recv_wr = 7}};
    to.qp = ibv_create_qp(pd, &init);
    CHECK(to.qp && init.cap.max_recv_wr == 0, "create_qp: %s", strerror(errno));
    take_to(&from, IBV_QPS_RTS, good_attr(context, to.qp->qp_num));
    take_to(&to, IBV_QPS_RTS, good_attr(context, from.qp->qp_num));
    struct ibv_recv_wr *bad, none = {0};
    FAILS(ibv_post_recv(to.qp, &none, &bad), EINVAL);
    for (int i = 0; i < 8; i++)
        FAILS(receive_one(&to, i, piece(&to, 0, 8)), 0);
    struct ibv_srq_attr limit = {.srq_limit = 7};
    struct ibv_sge sge = piece(&from, 0, 8);
    for (int i = 0; i < 8; i++) {
        if (i == 0 || i == 4) /* the second time it lies above what is left */
            FAILS(ibv_modify_srq(to.srq, &limit, IBV_SRQ_LIMIT), 0);
        FAILS(post_one(&from, &sge, (struct ibv_send_wr){.opcode = IBV_WR_SEND}), 0);
        CHECK(next_wc(from.send_cq).status == IBV_WC_SUCCESS && next_wc(to.recv_cq).status == IBV_WC_SUCCESS, "message %d", i);
        if (i == 1 || i == 4) {
            expect(context, IBV_EVENT_SRQ_LIMIT_REACHED, to.srq);
            struct ibv_srq_attr now;
            FAILS(ibv_query_srq(to.srq, &now), 0);
            CHECK(now.srq_limit == 0, "the limit is still armed");
        }
        quiet(context);
    }
    FAILS(simply_to(&to, IBV_QPS_ERR), 0);
    expect(context, IBV_EVENT_QP_LAST_WQE_REACHED, to.qp);
    quiet(context);
    destroy_any(&from);
    destroy_any(&to);
}

/* Reads events of a context until this one comes; GIDs that change with the port are not counted. */
static void wait_for(struct ibv_context *of, enum ibv_event_type type)
{
    for (;;) {
        struct ibv_async_event event = next_event(of);
        enum ibv_event_type got = event.event_type;
        int port_num = event.element.port_num;
        ibv_ack_async_event(&event);
        if (got == type) {
            CHECK(port_num == 1, "of port %d", port_num);
            return;
        }
        CHECK(got == IBV_EVENT_GID_CHANGE, "%s, not %s", ibv_event_type_str(got), ibv_event_type_str(type));
    }
}

/* The interface goes down and comes up: every context is told, and query_port says the same. */
static void port(void)
{
    struct ibv_context *contexts[2] = {context, open_device()};
    for (int up = 0; up < 2; up++) {
        ip("link set %s %s", netdev(), up ? "up" : "down");
        for (int i = 0; i < 2; i++) {
            wait_for(contexts[i], up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR);
            struct ibv_port_attr attr;
            FAILS(ibv_query_port(contexts[i], 1, &attr), 0);
            CHECK(attr.state == (up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN) && attr.phys_state == (up ? 5 : 3), "state %d", attr.state);
        }
    }
    FAILS(ibv_close_device(contexts[1]), 0);
}

/* Addresses come and go, and with them GIDs. */
static void gid(void)
{
    struct ibv_gid_entry table[64];
    ssize_t before = ibv_query_gid_table(context, table, 64, 0);
    CHECK(before > 0, "query_gid_table: %zd", before);
    for (int add = 1; add >= 0; add--) {
        ip("addr %s 10.77.0.5/24 dev %s", add ? "add" : "del", netdev());
        wait_for(context, IBV_EVENT_GID_CHANGE);
        ssize_t now = ibv_query_gid_table(context, table, 64, 0);
        CHECK(now == before + add, "%zd GIDs, and %zd before", now, before);
    }
    quiet(context);
}

static int device_is_there(void)
{
    int there = 0;
    struct ibv_device **list = ibv_get_device_list(NULL);
    for (int i = 0; list && list[i]; i++)
        there |= !strcmp(ibv_get_device_name(list[i]), getenv("DEV"));
    ibv_free_device_list(list);
    return there;
}

/* The interface is removed: work flushes, nothing can be made, everything can be destroyed. */
static void removed(void)
{
    struct ibv_context *other = open_device();
    struct any any = make_any(context, pd, IBV_QPT_RC), fresh = make_any(context, pd, IBV_QPT_RC);
    struct ibv_qp_attr attr = good_attr(context, any.qp->qp_num);
    take_to(&any, IBV_QPS_RTS, attr);
    struct ibv_ah *ah = handle_to(pd, attr);
    struct ibv_sge sge = piece(&any, 0, 8);
    FAILS(receive_one(&any, 1, sge), 0);
    ip("link del %s", netdev());
    wait_for(context, IBV_EVENT_DEVICE_FATAL);
    wait_for(other, IBV_EVENT_DEVICE_FATAL);
    CHECK(next_wc(any.recv_cq).status == IBV_WC_WR_FLUSH_ERR, "a receive that waited");
    FAILS(post_one(&any, &sge, (struct ibv_send_wr){.opcode = IBV_WR_SEND}), 0);
    CHECK(next_wc(any.send_cq).status == IBV_WC_WR_FLUSH_ERR, "a send");
    FAILS(receive_one(&any, 2, sge), 0);
    CHECK(next_wc(any.recv_cq).status == IBV_WC_WR_FLUSH_ERR, "a receive");
    struct ibv_port_attr port_attr;
    FAILS(ibv_query_port(context, 1, &port_attr), 0);
    CHECK(port_attr.state == IBV_PORT_DOWN, "the port is in state %d", port_attr.state);
    MAKES_NOTHING(ibv_alloc_pd(context), EIO);
    MAKES_NOTHING(ibv_create_cq(context, 1, NULL, NULL, 0), EIO);
    MAKES_NOTHING(ibv_create_comp_channel(context), EIO);
    MAKES_NOTHING(ibv_create_ah(pd, &attr.ah_attr), EIO);
    MAKES_NOTHING(ibv_reg_mr(pd, any.buffer, 8, 0), EIO);
    FAILS(simply_to(&fresh, IBV_QPS_RESET), EIO);
    FAILS(ibv_destroy_ah(ah), 0);
    destroy_any(&any);
    destroy_any(&fresh);
    quiet(context);
    FAILS(ibv_close_device(other), 0);

    /* A new one of that name is another device, although the old one is still open. */
    ip("link add %s type veth", netdev());
    ip("addr add 10.76.0.1/24 dev %s", netdev());
    ip("link set %s up", netdev());
    time_t end = time(NULL) + 30;
    while (!device_is_there())
        CHECK(time(NULL) < end, "no new device in 30 s");
    struct ibv_context *again = open_device();
    struct ibv_pd *again_pd = ibv_alloc_pd(again);
    CHECK(again_pd, "alloc_pd: %s", strerror(errno));
    MAKES_NOTHING(ibv_alloc_pd(context), EIO);
    FAILS(ibv_dealloc_pd(again_pd), 0);
    FAILS(ibv_close_device(again), 0);
}

/* Completions that one event stands for. */
static void moderation(void)
{
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    CHECK(channel, "create_comp_channel: %s", strerror(errno));
    struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, channel, 0), *of;
    struct ibv_qp *qp = on_cq(cq);
    struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
    FAILS(ibv_modify_qp(qp, &error, IBV_QP_STATE), 0);
    struct ibv_modify_cq_attr attr = {.attr_mask = 0, .moderate = {3, 0}};
    FAILS(ibv_modify_cq(cq, &attr), EINVAL);
    attr.attr_mask = 2;
    FAILS(ibv_modify_cq(cq, &attr), EOPNOTSUPP);
    attr.attr_mask = IBV_CQ_ATTR_MODERATE;
    FAILS(ibv_modify_cq(cq, &attr), 0);
    struct ibv_recv_wr *bad, wr = {0};
    void *unused;
    FAILS(ibv_req_notify_cq(cq, 0), 0);
    for (int i = 1; i <= 4; i++) {
        FAILS(ibv_post_recv(qp, &wr, &bad), 0); /* flushes at once */
        CHECK(readable(channel->fd, 0) == (i >= 3), "completion %d", i);
    }
    FAILS(ibv_get_cq_event(channel, &of, &unused), 0);
    CHECK(!readable(channel->fd, 0), "a second event");
    /* In time: the second completion never comes. */
    attr.moderate.cq_count = 2, attr.moderate.cq_period = 20000;
    FAILS(ibv_modify_cq(cq, &attr), 0);
    FAILS(ibv_req_notify_cq(cq, 0), 0);
    FAILS(ibv_post_recv(qp, &wr, &bad), 0);
    CHECK(readable(channel->fd, 10000), "no event after the period");
    FAILS(ibv_get_cq_event(channel, &of, &unused), 0);
    struct ibv_device_attr_ex ex;
    FAILS(ibv_query_device_ex(context, NULL, &ex), 0);
    CHECK(ex.cq_mod_caps.max_cq_count >= 3 && ex.cq_mod_caps.max_cq_period >= 20000, "cq_mod_caps");
    ibv_ack_cq_events(cq, 2);
    FAILS(ibv_destroy_qp(qp), 0);
    FAILS(ibv_destroy_cq(cq), 0);
    FAILS(ibv_destroy_comp_channel(channel), 0);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"established", established}, {"nonblocking", nonblocking}, {"overrun", overrun}, {"shared-receives", shared_receives},
        {"port", port}, {"gid", gid}, {"removed", removed}, {"moderation", moderation},
    };
    return run_case(argc, argv, cases, sizeof cases / sizeof *cases, &context, &pd);
}
