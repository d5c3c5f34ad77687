/* RDMA CM by the calls that wait (rdma_create_ep), with names resolved by rdma_getaddrinfo; and with queue pairs that
 * librdmacm does not know. */
#include "cm.h"

static struct rdma_addrinfo *find(const char *node, const char *service, int flags, int port_space, int type)
{
    struct rdma_addrinfo *found, hints = {.ai_flags = flags, .ai_port_space = port_space, .ai_qp_type = type};
    CHECK(!rdma_getaddrinfo(node, service, &hints, &found), "getaddrinfo: %s", strerror(errno));
    return found;
}

static struct ibv_qp_init_attr small(void)
{
    return (struct ibv_qp_init_attr){.cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1}, .sq_sig_all = 1};
}

static void getaddrinfo_case(void)
{
    struct rdma_addrinfo *found = find(own_ip(), "4000", 0, RDMA_PS_TCP, 0);
    SAME(found->ai_family, AF_INET);
    SAME(found->ai_port_space, RDMA_PS_TCP);
    SAME(found->ai_qp_type, IBV_QPT_RC);
    SAME(found->ai_dst_len, sizeof(struct sockaddr_in));
    SAME(((struct sockaddr_in *)found->ai_dst_addr)->sin_port, htons(4000));
    rdma_freeaddrinfo(found);
    found = find(own_ip(), "4000", RAI_PASSIVE, RDMA_PS_UDP, 0);
    SAME(found->ai_qp_type, IBV_QPT_UD);
    SAME(((struct sockaddr_in *)found->ai_src_addr)->sin_port, htons(4000));
    SAME(found->ai_dst_len, 0);
    rdma_freeaddrinfo(found);
    found = find(own_ip6(), "4000", RAI_NUMERICHOST | RAI_NOROUTE, RDMA_PS_TCP, 0);
    SAME(found->ai_family, AF_INET6);
    rdma_freeaddrinfo(found);
}

static struct rdma_cm_id *server_listener;
static void *server(void *unused)
{
    struct rdma_cm_id *id;
    static unsigned char buffer[1000];
    struct ibv_wc wc;
    WORKS(rdma_get_request(server_listener, &id));
    CHECK(id->qp && id->pd && id->recv_cq, "the request has no queue pair");
    CHECK(id->event && id->event->param.conn.private_data_len == 56 && !memcmp(id->event->param.conn.private_data, "hello", 6), "other private data");
    struct ibv_mr *mr = rdma_reg_msgs(id, buffer, sizeof buffer);
    WORKS(rdma_post_recv(id, NULL, buffer, sizeof buffer, mr));
    WORKS(rdma_accept(id, NULL));
    CHECK(rdma_get_recv_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS && wc.byte_len == 777, "receive: %s", ibv_wc_status_str(wc.status));
    WORKS(rdma_post_send(id, NULL, buffer, wc.byte_len, mr, 0));
    CHECK(rdma_get_send_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS, "send: %s", ibv_wc_status_str(wc.status));
    WORKS(rdma_disconnect(id));
    WORKS(rdma_dereg_mr(mr));
    rdma_destroy_ep(id);
    return unused;
}

static void endpoints(void)
{
    const char *all[] = {own_ip(), own_ip6()};
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_init_attr init = small();
        struct rdma_addrinfo *found = find(all[i], "0", RAI_PASSIVE, RDMA_PS_TCP, 0);
        WORKS(rdma_create_ep(&server_listener, found, NULL, &init));
        rdma_freeaddrinfo(found);
        WORKS(rdma_listen(server_listener, 4));
        pthread_t thread;
        CHECK(!pthread_create(&thread, NULL, server, NULL), "no thread");
        char service[8];
        snprintf(service, sizeof service, "%d", port_of(server_listener));
        found = find(all[i], service, 0, RDMA_PS_TCP, 0);
        struct rdma_cm_id *id;
        init = small();
        WORKS(rdma_create_ep(&id, found, NULL, &init));
        rdma_freeaddrinfo(found);
        static unsigned char out[777], in[1000];
        for (int j = 0; j < 777; j++)
            out[j] = j * 3;
        struct ibv_mr *out_mr = rdma_reg_msgs(id, out, sizeof out), *in_mr = rdma_reg_msgs(id, in, sizeof in);
        struct ibv_wc wc;
        WORKS(rdma_post_recv(id, NULL, in, sizeof in, in_mr));
        struct rdma_conn_param param = usual();
        param.private_data = "hello";
        param.private_data_len = 6;
        WORKS(rdma_connect(id, &param));
        WORKS(rdma_post_send(id, NULL, out, sizeof out, out_mr, 0));
        CHECK(rdma_get_send_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS, "send: %s", ibv_wc_status_str(wc.status));
        CHECK(rdma_get_recv_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS, "receive: %s", ibv_wc_status_str(wc.status));
        CHECK(!memcmp(in, out, sizeof out), "other data");
        WORKS(rdma_disconnect(id));
        pthread_join(thread, NULL);
        WORKS(rdma_dereg_mr(out_mr));
        WORKS(rdma_dereg_mr(in_mr));
        rdma_destroy_ep(id);
        rdma_destroy_ep(server_listener);
    }
}

/* Calls that wait say why they failed. */
static void errors(void)
{
    struct ibv_qp_init_attr init = small();
    struct rdma_addrinfo *found = find(own_ip(), "4002", RAI_NUMERICHOST, RDMA_PS_TCP, 0);
    struct rdma_cm_id *id;
    WORKS(rdma_create_ep(&id, found, NULL, &init));
    REFUSES(rdma_connect(id, NULL), ECONNREFUSED);
    rdma_destroy_ep(id);
    rdma_freeaddrinfo(found);
    if (getenv("CM_NOWHERE")) {
        found = find(getenv("CM_NOWHERE"), "4002", RAI_NUMERICHOST | RAI_NOROUTE, RDMA_PS_TCP, 0);
        init = small();
        REFUSES(rdma_create_ep(&id, found, NULL, &init), ENETUNREACH);
        rdma_freeaddrinfo(found);
    }
    if (getenv("CM_NOBODY")) {
        found = find(getenv("CM_NOBODY"), "4002", RAI_NUMERICHOST | RAI_NOROUTE, RDMA_PS_TCP, 0);
        init = small();
        REFUSES(rdma_create_ep(&id, found, NULL, &init), ETIMEDOUT);
        rdma_freeaddrinfo(found);
    }
}

/* Brings a queue pair to a state with the attributes that RDMA CM gives. */
static void bring(struct rdma_cm_id *id, struct ibv_qp *qp, enum ibv_qp_state to, int wanted)
{
    struct ibv_qp_attr attr = {.qp_state = to};
    int mask;
    WORKS(rdma_init_qp_attr(id, &attr, &mask));
    CHECK(mask == wanted, "the mask for state %d is %#x, not %#x", to, mask, wanted);
    SAME(attr.qp_state, to);
    FAILS(ibv_modify_qp(qp, &attr, mask), 0);
}

static const int to_init = IBV_QP_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
static const int to_rtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
static const int to_rts = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;

struct own {
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    unsigned char buffer[256];
};

static void make_own(struct own *own, struct ibv_context *verbs)
{
    own->pd = ibv_alloc_pd(verbs);
    own->cq = ibv_create_cq(verbs, 32, NULL, NULL, 0);
    struct ibv_qp_init_attr init = {.send_cq = own->cq, .recv_cq = own->cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
        .cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1}};
    own->qp = ibv_create_qp(own->pd, &init);
    CHECK(own->qp, "create_qp: %s", strerror(errno));
    own->mr = ibv_reg_mr(own->pd, own->buffer, sizeof own->buffer, IBV_ACCESS_LOCAL_WRITE);
}

static void drop_own(struct own *own)
{
    FAILS(ibv_destroy_qp(own->qp), 0);
    FAILS(ibv_dereg_mr(own->mr), 0);
    FAILS(ibv_destroy_cq(own->cq), 0);
    FAILS(ibv_dealloc_pd(own->pd), 0);
}

static void external_qp(void)
{
    struct connection c = {.active_channel = new_channel(), .passive_channel = new_channel()};
    static struct own one, two;
    c.listener = new_listener(c.passive_channel, RDMA_PS_TCP, own_ip(), 4);
    c.active = new_resolved(c.active_channel, RDMA_PS_TCP, own_ip(), port_of(c.listener));
    make_own(&one, c.active->verbs);
    bring(c.active, one.qp, IBV_QPS_INIT, to_init);
    struct rdma_conn_param param = usual();
    param.qp_num = one.qp->qp_num;
    WORKS(rdma_connect(c.active, &param));
    struct told told = next_told(c.passive_channel, CONNECT_REQUEST);
    SAME(told.event.param.conn.qp_num, one.qp->qp_num);
    c.passive = told.event.id;
    make_own(&two, c.passive->verbs);
    bring(c.passive, two.qp, IBV_QPS_INIT, to_init);
    bring(c.passive, two.qp, IBV_QPS_RTR, to_rtr);
    struct ibv_sge sge = {(uintptr_t)two.buffer, sizeof two.buffer, two.mr->lkey};
    struct ibv_recv_wr *bad_recv, recv = {.sg_list = &sge, .num_sge = 1};
    FAILS(ibv_post_recv(two.qp, &recv, &bad_recv), 0);
    param.qp_num = two.qp->qp_num;
    WORKS(rdma_accept(c.passive, &param));
    told = next_told(c.active_channel, CONNECT_RESPONSE); /* not established: that is up to the program */
    SAME(told.event.param.conn.qp_num, two.qp->qp_num);
    SILENT(c.passive_channel, 100);
    bring(c.active, one.qp, IBV_QPS_RTR, to_rtr);
    bring(c.active, one.qp, IBV_QPS_RTS, to_rts);
    WORKS(rdma_establish(c.active));
    TELLS(c.passive_channel, ESTABLISHED, 0);
    bring(c.passive, two.qp, IBV_QPS_RTS, to_rts);
    memset(one.buffer, 77, sizeof one.buffer);
    struct ibv_sge from = {(uintptr_t)one.buffer, 100, one.mr->lkey};
    struct ibv_send_wr *bad_send, send = {.sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND};
    FAILS(ibv_post_send(one.qp, &send, &bad_send), 0);
    CHECK(next_wc(one.cq).status == IBV_WC_SUCCESS && next_wc(two.cq).status == IBV_WC_SUCCESS, "a message");
    SAME(two.buffer[99], 77);
    /* Nor does librdmacm touch the queue pair at the end. */
    WORKS(rdma_disconnect(c.active));
    TELLS(c.passive_channel, DISCONNECTED, 0);
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    FAILS(ibv_query_qp(one.qp, &attr, IBV_QP_STATE, &init), 0);
    SAME(attr.qp_state, IBV_QPS_RTS);
    WORKS(rdma_disconnect(c.passive));
    TELLS(c.active_channel, DISCONNECTED, 0);
    drop_own(&one);
    drop_own(&two);
    drop_connection(&c);
}

/* The first message tells the passive end that the connection stands, when what the peer says of it is late. */
static void notify(void)
{
    struct connection c = {.active_channel = new_channel(), .passive_channel = new_channel()};
    static struct own one;
    c.listener = new_listener(c.passive_channel, RDMA_PS_TCP, own_ip(), 4);
    c.active = new_resolved(c.active_channel, RDMA_PS_TCP, own_ip(), port_of(c.listener));
    make_own(&one, c.active->verbs);
    struct rdma_conn_param param = usual();
    param.qp_num = one.qp->qp_num;
    WORKS(rdma_connect(c.active, &param));
    c.passive = next_told(c.passive_channel, CONNECT_REQUEST).event.id;
    new_qp(c.passive);
    param = usual();
    WORKS(rdma_accept(c.passive, &param));
    TELLS(c.active_channel, CONNECT_RESPONSE, 0);
    SILENT(c.passive_channel, 100);
    WORKS(rdma_notify(c.passive, IBV_EVENT_COMM_EST));
    TELLS(c.passive_channel, ESTABLISHED, 0);
    WORKS(rdma_establish(c.active));
    SILENT(c.passive_channel, 100); /* once only */
    REFUSES(rdma_notify(c.passive, IBV_EVENT_COMM_EST), EISCONN);
    SILENT(c.passive_channel, 100);
    drop_own(&one);
    drop_connection(&c);
}

/* The port space of InfiniBand service ids, with IP addresses. */
static void ib_port_space(void)
{
    struct connection c = new_connection(RDMA_PS_IB, own_ip());
    SAME(c.request.event.param.conn.private_data_len, 56);
    send_between(c.active, c.passive, 100);
    drop_connection(&c);
}

RUN_CM_CASES({"getaddrinfo", getaddrinfo_case}, {"endpoints", endpoints}, {"errors", errors}, {"external-qp", external_qp},
    {"notify", notify}, {"ib-port-space", ib_port_space})
