/* Messages both ways between two hosts, for ever, every one checked: for tests/e2e/xdp-life.
 *   streams serve PORT        takes one peer, by TCP
 *   streams ask IP PORT       is that peer
 *   streams flood IP PORT     as ask, but sends only, by UC, as fast as it can; the other side counts what arrives
 * Says "round N" for every ROUND messages that have arrived, or have been sent by "flood". Ends with an error when there
 * is one, or nothing arrives for a minute; well, with status 0, when it is told to by SIGTERM.
 * DEV, GIDX; LENGTH: longest message (8192). TIMEOUT: the queue pair's, as an exponent (16: 0.3 s). */
#include "verbs_any.h"
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <signal.h>

enum { ROUND = 100, OUTSTANDING = 16, PATIENCE = 60 };

struct end {
    struct address address;
    uint32_t flood;
};

static volatile sig_atomic_t over;
static void stop(int signal)
{
    (void)signal;
    over = 1;
}

static int number(const char *name, int usual)
{
    return getenv(name) ? atoi(getenv(name)) : usual;
}

/* The TCP connection to the peer. */
static int meet(const char *ip, int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
    int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0, "socket: %s", strerror(errno));
    if (ip) {
        CHECK(inet_pton(AF_INET, ip, &at.sin_addr) == 1, "no address: %s", ip);
        CHECK(!connect(fd, (struct sockaddr *)&at, sizeof at), "connect: %s", strerror(errno));
        return fd;
    }
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    CHECK(!bind(fd, (struct sockaddr *)&at, sizeof at) && !listen(fd, 1), "listen: %s", strerror(errno));
    int peer = accept(fd, NULL, NULL);
    CHECK(peer >= 0, "accept: %s", strerror(errno));
    close(fd);
    return peer;
}

/* Message `n` has this length, and these bytes. */
static uint32_t length_of(uint32_t n, uint32_t longest)
{
    return 8 + n * 2654435761u % (longest - 7);
}
static unsigned char byte_of(uint32_t n, uint32_t at)
{
    return n * 131 + at * 7 + (at >> 8);
}

int main(int argc, char **argv)
{
    int serve = argc == 3 && !strcmp(argv[1], "serve"), flood = argc == 4 && !strcmp(argv[1], "flood");
    CHECK(serve || flood || (argc == 4 && !strcmp(argv[1], "ask")), "usage: streams serve PORT | ask|flood IP PORT");
    signal(SIGTERM, stop);
    uint32_t longest = number("LENGTH", 8192);
    struct ibv_context *context = open_device();
    struct ibv_pd *pd = ibv_alloc_pd(context);
    CHECK(pd, "alloc_pd: %s", strerror(errno));
    int fd = meet(serve ? NULL : argv[2], atoi(argv[argc - 1]));
    struct end own = {.flood = flood}, peer;
    if (serve) { /* whoever asks says of what type the queue pairs are */
        CHECK(recv(fd, &peer, sizeof peer, MSG_WAITALL) == sizeof peer, "the peer is gone");
        own.flood = peer.flood;
    }
    struct any any = make_any(context, pd, own.flood ? IBV_QPT_UC : IBV_QPT_RC);
    size_t room = (size_t)longest * OUTSTANDING;
    unsigned char *out = aligned_alloc(4096, (room + 4095) & ~4095ul), *in = aligned_alloc(4096, (room + 4095) & ~4095ul);
    struct ibv_mr *out_mr = ibv_reg_mr(pd, out, room, 0), *in_mr = ibv_reg_mr(pd, in, room, IBV_ACCESS_LOCAL_WRITE);
    CHECK(out_mr && in_mr, "reg_mr: %s", strerror(errno));
    own.address.qpn = any.qp->qp_num;
    FAILS(ibv_query_gid(context, 1, gid_index(), &own.address.gid), 0);
    CHECK(write(fd, &own, sizeof own) == sizeof own, "write: %s", strerror(errno));
    if (!serve)
        CHECK(recv(fd, &peer, sizeof peer, MSG_WAITALL) == sizeof peer, "the peer is gone");
    struct ibv_qp_attr attr = good_attr(context, peer.address.qpn);
    attr.ah_attr.grh.dgid = peer.address.gid;
    attr.ah_attr.grh.hop_limit = 64;
    attr.rq_psn = attr.sq_psn;
    attr.timeout = number("TIMEOUT", 16);
    attr.retry_cnt = 7;
    attr.rnr_retry = 7;
    take_to(&any, IBV_QPS_RTS, attr);

    int receives = !flood, sends = flood || !own.flood;
    uint32_t sent = 0, arrived = 0, posted = 0, done = 0, said = 0;
    if (receives)
        for (int i = 0; i < OUTSTANDING; i++)
            FAILS(receive_one(&any, i, (struct ibv_sge){(uintptr_t)in + (size_t)i * longest, longest, in_mr->lkey}), 0);
    CHECK(write(fd, "r", 1) == 1 && read(fd, &(char){0}, 1) == 1, "the peer is gone");
    puts("begins");
    fflush(stdout);
    time_t last = time(NULL);
    while (!over) {
        struct ibv_wc wc;
        while (sends && posted - sent < OUTSTANDING) {
            uint32_t length = length_of(posted, longest);
            unsigned char *message = out + (size_t)(posted % OUTSTANDING) * longest;
            memcpy(message, &posted, 4);
            for (uint32_t at = 4; at < length; at++)
                message[at] = byte_of(posted, at);
            struct ibv_sge sge = {(uintptr_t)message, length, out_mr->lkey};
            FAILS(post_one(&any, &sge, (struct ibv_send_wr){.opcode = IBV_WR_SEND}), 0);
            posted++;
        }
        int n = ibv_poll_cq(any.send_cq, 1, &wc);
        CHECK(n >= 0, "poll_cq");
        if (n) {
            CHECK(wc.status == IBV_WC_SUCCESS || over, "message %u: %s", sent, ibv_wc_status_str(wc.status));
            sent++;
            done += flood;
        }
        n = receives ? ibv_poll_cq(any.recv_cq, 1, &wc) : 0;
        if (n) {
            CHECK(wc.status == IBV_WC_SUCCESS || over, "receive %u: %s", arrived, ibv_wc_status_str(wc.status));
            unsigned char *message = in + wc.wr_id * (size_t)longest;
            uint32_t which;
            memcpy(&which, message, 4);
            CHECK(own.flood || which == arrived, "message %u came, not %u", which, arrived);
            CHECK(wc.byte_len == length_of(which, longest), "message %u has %u bytes", which, wc.byte_len);
            for (uint32_t at = 4; at < wc.byte_len; at++)
                CHECK(message[at] == byte_of(which, at), "byte %u of message %u is wrong", at, which);
            FAILS(receive_one(&any, wc.wr_id, (struct ibv_sge){(uintptr_t)message, longest, in_mr->lkey}), 0);
            arrived++;
            done++;
        }
        if (n || flood)
            last = time(NULL);
        CHECK(time(NULL) - last < PATIENCE, "nothing arrives after message %u (sent %u of %u)", arrived, sent, posted);
        if (done / ROUND != said) {
            said = done / ROUND;
            printf("round %u\n", said);
            fflush(stdout);
        }
    }
    return 0;
}
