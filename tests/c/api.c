/* api CASE: what libibverbs promises beyond sending and receiving: events and their acknowledgement, the extended
 * completion queue, batches of ibv_wr_*, the GID table, address handles from completions, and errors. */
#include "verbs_any.h"
#include <sys/wait.h>

#define LENGTH 4096

static struct side pair[2];
static unsigned char *from, *to;
static struct ibv_mr *from_mr, *to_mr;

static void start(void)
{
    make_pair(pair);
    from = aligned_alloc(4096, LENGTH);
    to = aligned_alloc(4096, LENGTH);
    from_mr = reg(&pair[0], from, LENGTH);
    to_mr = reg(&pair[1], to, LENGTH);
}

/* A QP whose completions go to CQs with a channel; it takes the place of pair[side]. */
static struct ibv_comp_channel *with_channel(int side)
{
    struct ibv_comp_channel *channel = ibv_create_comp_channel(pair[0].context);
    CHECK(channel, "create_comp_channel: %s", strerror(errno));
    CHECK(!ibv_destroy_qp(pair[side].qp), "destroy_qp");
    CHECK(!ibv_destroy_cq(pair[side].cq), "destroy_cq");
    pair[side].cq = ibv_create_cq(pair[0].context, 2 * DEPTH, &pair[side], channel, 0);
    CHECK(pair[side].cq, "create_cq: %s", strerror(errno));
    struct ibv_qp_init_attr init = {.send_cq = pair[side].cq, .recv_cq = pair[side].cq, .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1, .cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1}};
    pair[side].qp = ibv_create_qp(pair[0].pd, &init);
    CHECK(pair[side].qp, "create_qp: %s", strerror(errno));
    pair[side].address.qpn = pair[side].qp->qp_num;
    struct ibv_qp_attr reset = {.qp_state = IBV_QPS_RESET};
    CHECK(!ibv_modify_qp(pair[!side].qp, &reset, IBV_QP_STATE), "to RESET");
    connect_side(&pair[0], &pair[1].address);
    connect_side(&pair[1], &pair[0].address);
    return channel;
}

static void one_message(void)
{
    CHECK(!receive_into(&pair[1], to, LENGTH, to_mr), "post_recv");
    CHECK(!send_from(&pair[0], from, LENGTH, from_mr), "post_send");
    CHECK(next_status(&pair[0]) == IBV_WC_SUCCESS, "send");
}

static void *acknowledge_later(void *cq)
{
    usleep(200000);
    ibv_ack_cq_events(cq, 1);
    return NULL;
}

static void completion_events(void)
{
    start();
    struct ibv_comp_channel *channel = with_channel(1);
    struct ibv_cq *cq;
    void *context;
    CHECK(ibv_destroy_comp_channel(channel) == EBUSY, "a channel in use is destroyed");
    one_message();
    CHECK(!readable(channel->fd, 0), "an event without ibv_req_notify_cq");
    CHECK(next_status(&pair[1]) == IBV_WC_SUCCESS, "receive");
    for (int i = 0; i < 3; i++) {
        CHECK(!ibv_req_notify_cq(pair[1].cq, 0), "req_notify_cq");
        CHECK(!readable(channel->fd, 0), "an event without a completion");
        one_message();
        CHECK(!ibv_get_cq_event(channel, &cq, &context), "get_cq_event: %s", strerror(errno));
        CHECK(cq == pair[1].cq && context == &pair[1], "the event is of another CQ");
        CHECK(next_status(&pair[1]) == IBV_WC_SUCCESS, "receive");
        one_message();
        CHECK(!readable(channel->fd, 0), "two events of one ibv_req_notify_cq");
        CHECK(next_status(&pair[1]) == IBV_WC_SUCCESS, "receive");
    }
    /* Solicited only. */
    CHECK(!ibv_req_notify_cq(pair[1].cq, 1), "req_notify_cq");
    one_message();
    CHECK(next_status(&pair[1]) == IBV_WC_SUCCESS, "receive");
    CHECK(!readable(channel->fd, 0), "an event of a message that is not solicited");
    /* Non-blocking, as programs with epoll use it. */
    CHECK(!fcntl(channel->fd, F_SETFL, O_NONBLOCK), "fcntl");
    CHECK(ibv_get_cq_event(channel, &cq, &context) == -1 && errno == EAGAIN, "get_cq_event without an event");
    /* One event unread, three to acknowledge, one of them while destroy_cq waits. */
    CHECK(!ibv_req_notify_cq(pair[1].cq, 0), "req_notify_cq");
    one_message();
    CHECK(readable(channel->fd, 5000), "no event");
    ibv_ack_cq_events(pair[1].cq, 2);
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, acknowledge_later, pair[1].cq), "pthread_create");
    CHECK(!ibv_destroy_qp(pair[1].qp), "destroy_qp");
    struct timespec before, after;
    clock_gettime(CLOCK_MONOTONIC, &before);
    CHECK(!ibv_destroy_cq(pair[1].cq), "destroy_cq");
    clock_gettime(CLOCK_MONOTONIC, &after);
    CHECK((after.tv_sec - before.tv_sec) * 1000 + (after.tv_nsec - before.tv_nsec) / 1000000 > 50,
        "destroy_cq does not wait for ibv_ack_cq_events");
    CHECK(!pthread_join(thread, NULL), "pthread_join");
    CHECK(!readable(channel->fd, 0), "an event of a CQ that is destroyed");
    CHECK(!ibv_destroy_comp_channel(channel), "destroy_comp_channel");
}

/* Sleeps on the channel while the peer is idle, then gets a message: the helper thread must notice it. */
static void *send_later(void *unused)
{
    usleep(300000);
    CHECK(!send_from(&pair[0], from, LENGTH, from_mr), "post_send");
    return unused;
}

static void wake_up(void)
{
    start();
    struct ibv_comp_channel *channel = with_channel(1);
    struct ibv_cq *cq;
    void *context;
    pthread_t thread;
    CHECK(!receive_into(&pair[1], to, LENGTH, to_mr), "post_recv");
    CHECK(!ibv_req_notify_cq(pair[1].cq, 0), "req_notify_cq");
    CHECK(!pthread_create(&thread, NULL, send_later, NULL), "pthread_create");
    CHECK(readable(channel->fd, 10000), "no event in 10 s");
    CHECK(!ibv_get_cq_event(channel, &cq, &context), "get_cq_event: %s", strerror(errno));
    ibv_ack_cq_events(cq, 1);
    CHECK(next_status(&pair[1]) == IBV_WC_SUCCESS, "receive");
    CHECK(!pthread_join(thread, NULL), "pthread_join");
}

static void *acknowledge_async_later(void *event)
{
    usleep(200000);
    ibv_ack_async_event(event);
    return NULL;
}

static void async_events(void)
{
    start();
    struct ibv_context *context = pair[0].context, *other = open_device();
    struct ibv_srq_init_attr init = {.attr = {.max_wr = 16, .max_sge = 1}};
    struct ibv_srq *srq = ibv_create_srq(pair[0].pd, &init);
    CHECK(srq, "create_srq: %s", strerror(errno));
    struct ibv_sge sge = {.addr = (uintptr_t)to, .length = LENGTH, .lkey = to_mr->lkey};
    struct ibv_recv_wr *bad, wr = {.sg_list = &sge, .num_sge = 1};
    for (int i = 0; i < 4; i++)
        CHECK(!ibv_post_srq_recv(srq, &wr, &bad), "post_srq_recv");
    CHECK(!ibv_destroy_qp(pair[1].qp), "destroy_qp");
    struct ibv_qp_init_attr qp_init = {.send_cq = pair[1].cq, .recv_cq = pair[1].cq, .srq = srq, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 4, .max_send_sge = 1}};
    pair[1].qp = ibv_create_qp(pair[0].pd, &qp_init);
    CHECK(pair[1].qp, "create_qp: %s", strerror(errno));
    pair[1].address.qpn = pair[1].qp->qp_num;
    struct ibv_qp_attr reset = {.qp_state = IBV_QPS_RESET};
    CHECK(!ibv_modify_qp(pair[0].qp, &reset, IBV_QP_STATE), "to RESET");
    connect_side(&pair[0], &pair[1].address);
    connect_side(&pair[1], &pair[0].address);
    CHECK(ibv_destroy_srq(srq) == EBUSY, "an SRQ in use is destroyed");

    struct ibv_srq_attr limit = {.srq_limit = 4};
    CHECK(!ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT), "modify_srq");
    struct ibv_srq_attr now;
    CHECK(!ibv_query_srq(srq, &now) && now.srq_limit == 4 && now.max_wr >= 16, "query_srq");
    CHECK(!readable(context->async_fd, 0), "an event too early");
    CHECK(!send_from(&pair[0], from, LENGTH, from_mr), "post_send");
    CHECK(next_status(&pair[1]) == IBV_WC_SUCCESS, "receive");
    struct ibv_async_event event;
    CHECK(readable(context->async_fd, 5000), "no limit event");
    CHECK(!ibv_get_async_event(context, &event), "get_async_event: %s", strerror(errno));
    CHECK(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == srq, "another event: %s",
        ibv_event_type_str(event.event_type));
    CHECK(!readable(other->async_fd, 0), "the event went to another context too");

    /* The last receive of a QP on an SRQ. */
    struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
    struct ibv_async_event last;
    CHECK(!ibv_modify_qp(pair[1].qp, &error, IBV_QP_STATE), "to ERR");
    CHECK(readable(context->async_fd, 5000), "no event of the last WQE");
    CHECK(!ibv_get_async_event(context, &last), "get_async_event: %s", strerror(errno));
    CHECK(last.event_type == IBV_EVENT_QP_LAST_WQE_REACHED && last.element.qp == pair[1].qp, "another event: %s",
        ibv_event_type_str(last.event_type));
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, acknowledge_async_later, &last), "pthread_create");
    CHECK(!ibv_destroy_qp(pair[1].qp), "destroy_qp");
    CHECK(!pthread_join(thread, NULL), "pthread_join");
    CHECK(!pthread_create(&thread, NULL, acknowledge_async_later, &event), "pthread_create");
    CHECK(!ibv_destroy_srq(srq), "destroy_srq");
    CHECK(!pthread_join(thread, NULL), "pthread_join");

    /* An overrun of a CQ whose event is never read. */
    CHECK(!ibv_destroy_qp(pair[0].qp), "destroy_qp");
    struct ibv_cq *small = ibv_create_cq(context, 1, NULL, NULL, 0);
    CHECK(small, "create_cq: %s", strerror(errno));
    struct ibv_qp_init_attr small_init = {.send_cq = small, .recv_cq = small, .qp_type = IBV_QPT_RC,
        .cap = {.max_recv_wr = 8, .max_recv_sge = 1, .max_send_wr = 1, .max_send_sge = 1}};
    struct ibv_qp *qp = ibv_create_qp(pair[0].pd, &small_init);
    CHECK(qp, "create_qp: %s", strerror(errno));
    struct ibv_qp_attr to_init = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    CHECK(!ibv_modify_qp(qp, &to_init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "to INIT");
    for (int i = 0; i < 4; i++)
        CHECK(!ibv_post_recv(qp, &wr, &bad), "post_recv");
    CHECK(!ibv_modify_qp(qp, &error, IBV_QP_STATE), "to ERR");
    CHECK(readable(context->async_fd, 5000), "no event of the overrun");
    CHECK(!ibv_destroy_qp(qp), "destroy_qp");
    CHECK(!ibv_destroy_cq(small), "destroy_cq");
    CHECK(!readable(context->async_fd, 0), "an event of a CQ that is destroyed");
    CHECK(!ibv_close_device(other), "close_device");
}

static void extended_cq(void)
{
    start();
    struct ibv_cq_init_attr_ex attr = {.cqe = 64, .cq_context = &pair[1],
        .wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK};
    struct ibv_cq_ex *cq = ibv_create_cq_ex(pair[0].context, &attr);
    CHECK(cq, "create_cq_ex: %s", strerror(errno));
    struct ibv_cq_init_attr_ex vlan = {.cqe = 64, .wc_flags = IBV_WC_EX_WITH_CVLAN};
    MAKES_NOTHING(ibv_create_cq_ex(pair[0].context, &vlan), EOPNOTSUPP);
    CHECK(!ibv_destroy_qp(pair[1].qp), "destroy_qp");
    struct ibv_qp_init_attr init = {.send_cq = ibv_cq_ex_to_cq(cq), .recv_cq = ibv_cq_ex_to_cq(cq), .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1}};
    pair[1].qp = ibv_create_qp(pair[0].pd, &init);
    CHECK(pair[1].qp, "create_qp: %s", strerror(errno));
    pair[1].address.qpn = pair[1].qp->qp_num;
    struct ibv_qp_attr reset = {.qp_state = IBV_QPS_RESET};
    CHECK(!ibv_modify_qp(pair[0].qp, &reset, IBV_QP_STATE), "to RESET");
    connect_side(&pair[0], &pair[1].address);
    connect_side(&pair[1], &pair[0].address);
    struct ibv_poll_cq_attr poll_attr = {0};
    FAILS(ibv_start_poll(cq, &poll_attr), ENOENT);
    FAILS(ibv_start_poll(cq, &poll_attr), ENOENT); /* the first left no lock behind */

    struct ibv_values_ex before = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK}, after = before;
    CHECK(!ibv_query_rt_values_ex(pair[0].context, &before), "query_rt_values_ex");
    for (int i = 0; i < 3; i++) {
        struct ibv_sge sge = {.addr = (uintptr_t)to, .length = LENGTH, .lkey = to_mr->lkey};
        struct ibv_recv_wr *bad, wr = {.wr_id = 100 + i, .sg_list = &sge, .num_sge = 1};
        CHECK(!ibv_post_recv(pair[1].qp, &wr, &bad), "post_recv");
        struct ibv_sge s = {.addr = (uintptr_t)from, .length = 100 + i, .lkey = from_mr->lkey};
        struct ibv_send_wr *bad_send, send = {.sg_list = &s, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = 7 + i};
        CHECK(!ibv_post_send(pair[0].qp, &send, &bad_send), "post_send");
        CHECK(next_status(&pair[0]) == IBV_WC_SUCCESS, "send");
    }
    int rc;
    time_t end = time(NULL) + 30;
    while ((rc = ibv_start_poll(cq, &poll_attr)) == ENOENT)
        CHECK(time(NULL) < end, "no completion");
    CHECK(!ibv_query_rt_values_ex(pair[0].context, &after), "query_rt_values_ex");
    uint64_t low = before.raw_clock.tv_sec * 1000000000ull + before.raw_clock.tv_nsec;
    uint64_t high = after.raw_clock.tv_sec * 1000000000ull + after.raw_clock.tv_nsec;
    for (int i = 0; i < 3; i++) {
        CHECK(!rc, "poll: %s", strerror(rc));
        CHECK(cq->wr_id == (uint64_t)(100 + i) && cq->status == IBV_WC_SUCCESS, "another completion: %d", (int)cq->wr_id);
        CHECK(ibv_wc_read_opcode(cq) == IBV_WC_RECV && ibv_wc_read_byte_len(cq) == (uint32_t)(100 + i), "fields");
        CHECK(ibv_wc_read_imm_data(cq) == (uint32_t)(7 + i) && ibv_wc_read_wc_flags(cq) & IBV_WC_WITH_IMM, "immediate data");
        CHECK(ibv_wc_read_qp_num(cq) == pair[1].qp->qp_num && ibv_wc_read_vendor_err(cq) == 0, "QP number");
        uint64_t stamp = ibv_wc_read_completion_ts(cq), wall = ibv_wc_read_completion_wallclock_ns(cq);
        CHECK(stamp >= low && (i > 0 || stamp <= high), "timestamp %lu is not in %lu..%lu", stamp, low, high);
        CHECK(wall / 1000000000 + 60 > (uint64_t)time(NULL) && wall / 1000000000 <= (uint64_t)time(NULL), "wall clock");
        rc = ibv_next_poll(cq);
    }
    CHECK(rc == ENOENT, "a fourth completion");
    ibv_end_poll(cq);
    FAILS(ibv_start_poll(cq, &poll_attr), ENOENT);
    CHECK(!ibv_destroy_qp(pair[1].qp), "destroy_qp");
    CHECK(!ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), "destroy_cq");
}

static void batches(void)
{
    start();
    struct ibv_qp_init_attr_ex init = {.send_cq = pair[0].cq, .recv_cq = pair[0].cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
        .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 2, .max_recv_sge = 1, .max_inline_data = 64},
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .pd = pair[0].pd,
        .send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM};
    CHECK(!ibv_qp_to_qp_ex(pair[0].qp), "a plain QP has the functions");
    CHECK(!ibv_destroy_qp(pair[0].qp), "destroy_qp");
    pair[0].qp = ibv_create_qp_ex(pair[0].context, &init);
    CHECK(pair[0].qp, "create_qp_ex: %s", strerror(errno));
    struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(pair[0].qp);
    CHECK(qp, "no functions");
    init.send_ops_flags = IBV_QP_EX_WITH_TSO;
    MAKES_NOTHING(ibv_create_qp_ex(pair[0].context, &init), EOPNOTSUPP);
    pair[0].address.qpn = pair[0].qp->qp_num;
    struct ibv_qp_attr reset = {.qp_state = IBV_QPS_RESET};
    CHECK(!ibv_modify_qp(pair[1].qp, &reset, IBV_QP_STATE), "to RESET");
    ibv_wr_start(qp);
    ibv_wr_send(qp);
    FAILS(ibv_wr_complete(qp), EINVAL); /* not RTS yet */
    connect_side(&pair[0], &pair[1].address);
    connect_side(&pair[1], &pair[0].address);

    /* All or nothing: five do not fit into a queue of four. */
    ibv_wr_start(qp);
    for (int i = 0; i < 5; i++) {
        ibv_wr_send(qp);
        ibv_wr_set_sge(qp, from_mr->lkey, (uintptr_t)from, 10);
    }
    FAILS(ibv_wr_complete(qp), ENOMEM);
    /* Three entries where two fit, in the last of a batch. */
    struct ibv_sge three[3] = {{(uintptr_t)from, 1, from_mr->lkey}, {(uintptr_t)from, 1, from_mr->lkey}, {(uintptr_t)from, 1, from_mr->lkey}};
    ibv_wr_start(qp);
    ibv_wr_send(qp);
    ibv_wr_send(qp);
    ibv_wr_set_sge_list(qp, 3, three);
    FAILS(ibv_wr_complete(qp), EINVAL);
    /* Too much inline data. */
    ibv_wr_start(qp);
    ibv_wr_send(qp);
    ibv_wr_set_inline_data(qp, from, 65);
    FAILS(ibv_wr_complete(qp), ENOMEM);
    /* An operation that the device has not. */
    ibv_wr_start(qp);
    ibv_wr_send_tso(qp, from, 14, 100);
    FAILS(ibv_wr_complete(qp), EOPNOTSUPP);
    /* Dropped. */
    ibv_wr_start(qp);
    ibv_wr_send(qp);
    ibv_wr_abort(qp);
    struct ibv_wc wc;
    CHECK(ibv_poll_cq(pair[0].cq, 1, &wc) == 0, "a completion of what was not posted");

    for (int i = 0; i < 4; i++)
        CHECK(!receive_into(&pair[1], to + 100 * i, 100, to_mr), "post_recv");
    memset(from, 'a', 50);
    memset(from + 50, 'b', 50);
    char word[] = "inline";
    struct ibv_data_buf parts[2] = {{"two", 3}, {"parts", 5}};
    struct ibv_sge two[2] = {{(uintptr_t)from, 50, from_mr->lkey}, {(uintptr_t)from + 50, 50, from_mr->lkey}};
    ibv_wr_start(qp);
    qp->wr_id = 1;
    ibv_wr_send(qp);
    ibv_wr_set_sge_list(qp, 2, two);
    qp->wr_id = 2;
    ibv_wr_send_imm(qp, 77);
    ibv_wr_set_inline_data(qp, word, sizeof(word));
    memset(word, 0, sizeof(word)); /* it was copied */
    qp->wr_id = 3;
    ibv_wr_send(qp);
    ibv_wr_set_inline_data_list(qp, 2, parts);
    qp->wr_id = 4;
    ibv_wr_send(qp);
    FAILS(ibv_wr_complete(qp), 0);
    for (uint64_t i = 1; i <= 4; i++) {
        time_t end = time(NULL) + 30;
        while (ibv_poll_cq(pair[0].cq, 1, &wc) == 0)
            CHECK(time(NULL) < end, "no completion");
        CHECK(wc.wr_id == i && wc.status == IBV_WC_SUCCESS, "completion %d: %s", (int)wc.wr_id, ibv_wc_status_str(wc.status));
        while (ibv_poll_cq(pair[1].cq, 1, &wc) == 0)
            CHECK(time(NULL) < end, "no completion");
        uint32_t lengths[] = {100, 7, 8, 0};
        CHECK(wc.status == IBV_WC_SUCCESS && wc.byte_len == lengths[i - 1], "receive %d of %u bytes", (int)i, wc.byte_len);
        CHECK(!(wc.wc_flags & IBV_WC_WITH_IMM) == (i != 2), "immediate data of %d", (int)i);
    }
    CHECK(to[0] == 'a' && to[99] == 'b' && !memcmp(to + 100, "inline", 7) && !memcmp(to + 200, "twoparts", 8), "data");
}

static void gids(void)
{
    struct ibv_context *context = open_device();
    struct ibv_gid_entry table[64], entry;
    union ibv_gid gid;
    ssize_t count = ibv_query_gid_table(context, table, 64, 0);
    CHECK(count > 0, "query_gid_table: %zd", count);
    for (ssize_t i = 0; i < count; i++) {
        CHECK(table[i].gid_type == IBV_GID_TYPE_ROCE_V2 && table[i].port_num == 1 && table[i].ndev_ifindex, "entry %zd", i);
        CHECK(!ibv_query_gid_ex(context, 1, table[i].gid_index, &entry, 0), "query_gid_ex");
        CHECK(!memcmp(&entry, &table[i], sizeof(entry)), "query_gid_ex gives another entry");
        CHECK(!ibv_query_gid(context, 1, table[i].gid_index, &gid) && !memcmp(&gid, &entry.gid, 16), "query_gid");
    }
    struct ibv_port_attr port;
    CHECK(!ibv_query_port(context, 1, &port), "query_port");
    CHECK(port.state == IBV_PORT_ACTIVE && port.link_layer == IBV_LINK_LAYER_ETHERNET && port.gid_tbl_len > 0, "port");
    FAILS(ibv_query_gid_ex(context, 1, port.gid_tbl_len - 1, &entry, 0), ENODATA);
    FAILS(ibv_query_gid_ex(context, 1, port.gid_tbl_len, &entry, 0), EINVAL);
    FAILS(ibv_query_gid_ex(context, 2, 0, &entry, 0), EINVAL);
    FAILS(ibv_query_port(context, 2, &port), EINVAL);
    uint16_t pkey;
    CHECK(!ibv_query_pkey(context, 1, 0, &pkey) && pkey == 0xffff, "query_pkey");
    CHECK(ibv_get_pkey_index(context, 1, 0xffff) == 0, "get_pkey_index");
    CHECK(ibv_get_device_guid(context->device) != 0, "GUID");
    struct ibv_device_attr attr;
    struct ibv_device_attr_ex ex;
    CHECK(!ibv_query_device(context, &attr) && attr.node_guid == ibv_get_device_guid(context->device), "query_device");
    CHECK(!ibv_query_device_ex(context, NULL, &ex) && ex.phys_port_cnt_ex == 1, "query_device_ex");
    CHECK(!memcmp(&ex.orig_attr, &attr, sizeof(attr)), "query_device_ex gives another device");
    CHECK(!ibv_close_device(context), "close_device");
}

/* The answer to a datagram goes where ibv_create_ah_from_wc says. */
static void answers(void)
{
    struct ibv_context *context = open_device();
    struct ibv_pd *pd = ibv_alloc_pd(context);
    struct side sides[2];
    struct ibv_mr *mr[2];
    unsigned char *buffer[2];
    for (int i = 0; i < 2; i++) {
        sides[i] = (struct side){.context = context, .pd = pd, .cq = ibv_create_cq(context, 8, NULL, NULL, 0)};
        struct ibv_qp_init_attr init = {.send_cq = sides[i].cq, .recv_cq = sides[i].cq, .qp_type = IBV_QPT_UD, .sq_sig_all = 1,
            .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1}};
        sides[i].qp = ibv_create_qp(pd, &init);
        CHECK(sides[i].qp, "create_qp: %s", strerror(errno));
        struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 0x1111};
        CHECK(!ibv_modify_qp(sides[i].qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), "to INIT");
        attr.qp_state = IBV_QPS_RTR;
        CHECK(!ibv_modify_qp(sides[i].qp, &attr, IBV_QP_STATE), "to RTR");
        attr.qp_state = IBV_QPS_RTS;
        CHECK(!ibv_modify_qp(sides[i].qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), "to RTS");
        buffer[i] = calloc(1, LENGTH);
        mr[i] = reg(&sides[i], buffer[i], LENGTH);
        CHECK(!receive_into(&sides[i], buffer[i], 40 + 100, mr[i]), "post_recv");
    }
    int gid_index = getenv("GIDX") ? atoi(getenv("GIDX")) : 0;
    struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1, .grh = {.hop_limit = 64, .sgid_index = gid_index, .traffic_class = 0x20}};
    CHECK(!ibv_query_gid(context, 1, gid_index, &attr.grh.dgid), "query_gid");
    struct ibv_ah *ah = ibv_create_ah(pd, &attr);
    CHECK(ah, "create_ah: %s", strerror(errno));
    attr.is_global = 0;
    MAKES_NOTHING(ibv_create_ah(pd, &attr), EINVAL);
    attr.is_global = 1, attr.grh.sgid_index = 200;
    MAKES_NOTHING(ibv_create_ah(pd, &attr), EINVAL);
    for (int i = 0; i < 2; i++) {
        unsigned char *data = buffer[i] + 2048;
        memset(data, 0x40 + i, 100);
        struct ibv_sge sge = {.addr = (uintptr_t)data, .length = 100, .lkey = mr[i]->lkey};
        struct ibv_send_wr *bad, wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
            .wr.ud = {.ah = ah, .remote_qpn = sides[!i].qp->qp_num, .remote_qkey = 0x1111}};
        CHECK(!ibv_post_send(sides[i].qp, &wr, &bad), "post_send");
        CHECK(next_status(&sides[i]) == IBV_WC_SUCCESS, "send");
        struct ibv_wc wc;
        time_t end = time(NULL) + 30;
        while (ibv_poll_cq(sides[!i].cq, 1, &wc) == 0)
            CHECK(time(NULL) < end, "no completion");
        CHECK(wc.status == IBV_WC_SUCCESS && wc.byte_len == 140 && wc.wc_flags & IBV_WC_GRH, "receive: %s of %u bytes",
            ibv_wc_status_str(wc.status), wc.byte_len);
        CHECK(wc.src_qp == sides[i].qp->qp_num && !memcmp(buffer[!i] + 40, data, 100), "datagram");
        CHECK(!ibv_destroy_ah(ah), "destroy_ah");
        ah = ibv_create_ah_from_wc(pd, &wc, (struct ibv_grh *)buffer[!i], 1);
        CHECK(ah, "create_ah_from_wc: %s", strerror(errno));
    }
    CHECK(!ibv_destroy_ah(ah), "destroy_ah");
}

static void errors(void)
{
    start();
    struct ibv_context *context = pair[0].context;
    struct ibv_pd *pd = pair[0].pd;
    struct ibv_cq *cq = pair[0].cq;
    struct ibv_device_attr most;
    CHECK(!ibv_query_device(context, &most), "query_device");

    MAKES_NOTHING(ibv_create_cq(context, 0, NULL, NULL, 0), EINVAL);
    MAKES_NOTHING(ibv_create_cq(context, -1, NULL, NULL, 0), EINVAL);
    MAKES_NOTHING(ibv_create_cq(context, most.max_cqe + 1, NULL, NULL, 0), EINVAL);
    MAKES_NOTHING(ibv_create_cq(context, 1, NULL, NULL, context->num_comp_vectors), EINVAL);
    MAKES_NOTHING(ibv_reg_mr(pd, NULL, 4096, IBV_ACCESS_LOCAL_WRITE), EFAULT);
    MAKES_NOTHING(ibv_reg_mr(pd, (void *)errors, 16, IBV_ACCESS_LOCAL_WRITE), EFAULT); /* code is read-only */
    MAKES_NOTHING(ibv_reg_mr(pd, from, LENGTH, IBV_ACCESS_REMOTE_WRITE), EINVAL);
    MAKES_NOTHING(ibv_reg_mr(pd, from, LENGTH, 1 << 15), EINVAL);
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = most.max_sge + 1, .max_recv_sge = 1}};
    MAKES_NOTHING(ibv_create_qp(pd, &init), EINVAL);
    init.cap.max_send_sge = 1, init.cap.max_send_wr = most.max_qp_wr + 1;
    MAKES_NOTHING(ibv_create_qp(pd, &init), EINVAL);
    init.cap.max_send_wr = 4, init.recv_cq = NULL;
    MAKES_NOTHING(ibv_create_qp(pd, &init), EINVAL);
    init.recv_cq = cq, init.qp_type = IBV_QPT_RAW_PACKET;
    MAKES_NOTHING(ibv_create_qp(pd, &init), EOPNOTSUPP);
    init.qp_type = IBV_QPT_RC;

    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    CHECK(qp, "create_qp: %s", strerror(errno));
    struct ibv_sge sge = {.addr = (uintptr_t)from, .length = 1, .lkey = from_mr->lkey};
    struct ibv_recv_wr receives[6], *bad_receive = NULL;
    struct ibv_send_wr sends[6], *bad = NULL;
    for (int i = 0; i < 6; i++) {
        receives[i] = (struct ibv_recv_wr){.next = i < 5 ? &receives[i + 1] : NULL, .sg_list = &sge, .num_sge = 1};
        sends[i] = (struct ibv_send_wr){.next = i < 5 ? &sends[i + 1] : NULL, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND};
    }
    FAILS(ibv_post_recv(qp, receives, &bad_receive), EINVAL); /* RESET */
    CHECK(bad_receive == &receives[0], "bad_wr");
    FAILS(ibv_post_send(qp, sends, &bad), EINVAL);
    CHECK(bad == &sends[0], "bad_wr");
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR, .port_num = 1};
    FAILS(ibv_modify_qp(qp, &attr, IBV_QP_STATE), EINVAL); /* from RESET to RTR */
    attr.qp_state = IBV_QPS_INIT;
    FAILS(ibv_modify_qp(qp, &attr, IBV_QP_STATE), EINVAL); /* the port is missing */
    attr.port_num = 2;
    FAILS(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), EINVAL);
    attr.port_num = 1;
    FAILS(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS | 1 << 30), EINVAL);
    FAILS(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
    FAILS(ibv_post_recv(qp, receives, &bad_receive), ENOMEM); /* six into four */
    CHECK(bad_receive == &receives[4], "bad_wr is number %td", bad_receive - receives);
    struct ibv_qp_attr now;
    struct ibv_qp_init_attr made;
    FAILS(ibv_query_qp(qp, &now, IBV_QP_STATE, &made), 0);
    CHECK(now.qp_state == IBV_QPS_INIT && now.port_num == 1 && made.send_cq == cq && made.qp_type == IBV_QPT_RC, "query_qp");
    CHECK(made.cap.max_send_wr >= 4 && made.cap.max_recv_wr >= 4, "query_qp gives %u and %u", made.cap.max_send_wr, made.cap.max_recv_wr);
    FAILS(ibv_destroy_qp(qp), 0);

    sends[2].num_sge = 2; /* the pair's queues take one */
    FAILS(ibv_post_send(pair[0].qp, sends, &bad), EINVAL);
    CHECK(bad == &sends[2], "bad_wr is number %td", bad - sends);
    sends[2].num_sge = 1, sends[2].opcode = IBV_WR_TSO;
    FAILS(ibv_post_send(pair[0].qp, &sends[2], &bad), EINVAL);
    sends[2].opcode = IBV_WR_SEND, sends[2].num_sge = -1;
    FAILS(ibv_post_send(pair[0].qp, &sends[2], &bad), EINVAL);
    FAILS(ibv_query_qp(pair[0].qp, &now, IBV_QP_AV, &made), 0);
    CHECK(now.dest_qp_num == pair[1].qp->qp_num && now.ah_attr.is_global && now.timeout == 14, "query_qp");
    CHECK(!memcmp(&now.ah_attr.grh.dgid, &pair[1].address.gid, 16), "query_qp gives another address");
    FAILS(ibv_dealloc_pd(pd), EBUSY);
    FAILS(ibv_destroy_cq(cq), EBUSY);
    FAILS(ibv_resize_cq(cq, 0), EINVAL);
    FAILS(ibv_resize_cq(cq, 300), 0);
    CHECK(cq->cqe >= 300, "resize_cq");
    CHECK(!ibv_dereg_mr(from_mr) && !ibv_dereg_mr(to_mr), "dereg_mr");
    destroy_pair(pair);
}

/* A forked child has no use of what its parent opened, but may open the device itself. */
static void child_opens(void)
{
    int status;
    start();
    transfer(pair, from, from_mr, to, to_mr, LENGTH, 1);
    pid_t pid = fork();
    CHECK(pid >= 0, "fork: %s", strerror(errno));
    if (pid == 0) {
        alarm(30);
        CHECK(send_from(&pair[0], from, LENGTH, from_mr) == EIO, "post_send on the parent's QP");
        CHECK(ibv_req_notify_cq(pair[0].cq, 0) == EIO, "req_notify_cq on the parent's CQ");
        MAKES_NOTHING(ibv_create_comp_channel(pair[0].context), EIO);
        start();
        for (int i = 0; i < 20; i++)
            transfer(pair, from, from_mr, to, to_mr, LENGTH, i);
        CHECK(!ibv_dereg_mr(from_mr) && !ibv_dereg_mr(to_mr), "dereg_mr");
        destroy_pair(pair);
        exit(0);
    }
    for (int i = 0; i < 20; i++)
        transfer(pair, from, from_mr, to, to_mr, LENGTH, i);
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0,
        "the child ended with wait status %#x", status);
    transfer(pair, from, from_mr, to, to_mr, LENGTH, 1);
}

int main(int argc, char **argv)
{
    static const struct { const char *name; void (*run)(void); } cases[] = {
        {"completion-events", completion_events}, {"wake-up", wake_up}, {"async-events", async_events},
        {"extended-cq", extended_cq}, {"batches", batches}, {"gids", gids}, {"answers", answers}, {"errors", errors},
        {"child-opens", child_opens},
    };
    alarm(60);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        if (argc == 2 && !strcmp(argv[1], cases[i].name)) {
            cases[i].run();
            puts("ok");
            return 0;
        }
    die("usage: api CASE");
}
