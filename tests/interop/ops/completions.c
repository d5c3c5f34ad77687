/* Completions, awaited and compared field by field. */
#include "ops.h"
#include <unistd.h>

bool try_completion(struct session *s, struct ibv_cq *cq, struct ibv_wc *wc)
{
    memset(wc, 0xa5, sizeof *wc);
    int n = ibv_poll_cq(cq, 1, wc);
    MUST(n >= 0, "poll_cq: %d", n);
    return n == 1;
}

static void await(struct session *s, struct ibv_cq *cq, struct ibv_wc *wc, long wr_id)
{
    double end = now() + PATIENCE;
    for (unsigned tries = 1; !try_completion(s, cq, wc); tries++) {
        MUST(now() < end, "no completion %#lx in %d s", wr_id, PATIENCE);
        if (tries % 1024 == 0)
            notice_end(s);
    }
}

void next_completion(struct session *s, struct ibv_cq *cq, struct ibv_wc *wc)
{
    await(s, cq, wc, ANY);
}

/* On errors only some fields have a meaning. */
void check_completion(struct session *s, const struct pair *pair, const struct ibv_wc *wc, const struct expected *expected)
{
    MUST(wc->status == expected->status && wc->wr_id == expected->wr_id,
        "completion %#lx with \"%s\" (vendor %#x), not %#lx with \"%s\"", (unsigned long)wc->wr_id,
        ibv_wc_status_str(wc->status), wc->vendor_err, (unsigned long)expected->wr_id, ibv_wc_status_str(expected->status));
    MUST(wc->qp_num == pair->qp->qp_num, "completion of QP %#x, not %#x", wc->qp_num, pair->qp->qp_num);
    if (wc->status != IBV_WC_SUCCESS)
        return;
    unsigned flags = wc->wc_flags, wanted = expected->flags;
    /* rxe says that connected queue pairs have a GRH too. */
    if (s->rxe && pair->options.type != IBV_QPT_UD)
        flags &= ~(unsigned)IBV_WC_GRH;
    /* It names invalidation by the kernel's number, which is another flag's here. */
    if (s->rxe && wanted & IBV_WC_WITH_INV && flags == IBV_WC_IP_CSUM_OK)
        flags = IBV_WC_WITH_INV;
    MUST(wc->opcode == expected->opcode, "completion %#lx: opcode %d, not %d", (unsigned long)wc->wr_id, wc->opcode, expected->opcode);
    MUST(wc->vendor_err == 0, "completion %#lx: vendor error %#x", (unsigned long)wc->wr_id, wc->vendor_err);
    MUST(expected->length == ANY || wc->byte_len == expected->length, "completion %#lx: %u bytes, not %ld",
        (unsigned long)wc->wr_id, wc->byte_len, (long)expected->length);
    if (!(wc->opcode & IBV_WC_RECV))
        return;
    MUST(flags == wanted, "completion %#lx: flags %#x, not %#x", (unsigned long)wc->wr_id, flags, wanted);
    if (wanted & IBV_WC_WITH_IMM)
        MUST(wc->imm_data == expected->imm, "completion %#lx: immediate %#x, not %#x", (unsigned long)wc->wr_id, wc->imm_data, expected->imm);
    if (wanted & IBV_WC_WITH_INV)
        MUST(wc->invalidated_rkey == expected->imm, "completion %#lx: invalidated %#x, not %#x", (unsigned long)wc->wr_id, wc->invalidated_rkey, expected->imm);
    MUST(expected->source == ANY || wc->src_qp == expected->source, "completion %#lx: from QP %#x, not %#lx",
        (unsigned long)wc->wr_id, wc->src_qp, (long)expected->source);
    MUST(wc->pkey_index == 0, "completion %#lx: P_Key index %d", (unsigned long)wc->wr_id, wc->pkey_index);
}

void expect(struct session *s, const struct pair *pair, struct ibv_cq *cq, const struct expected *expected)
{
    struct ibv_wc wc;
    await(s, cq, &wc, (long)expected->wr_id);
    check_completion(s, pair, &wc, expected);
}

/* A completion with an error, or of which nothing else is to be known. */
void expect_status(struct session *s, const struct pair *pair, struct ibv_cq *cq, uint64_t wr_id, enum ibv_wc_status status)
{
    struct ibv_wc wc;
    await(s, cq, &wc, (long)wr_id);
    MUST(wc.wr_id == wr_id && wc.status == status && wc.qp_num == pair->qp->qp_num,
        "completion %#lx with \"%s\" (vendor %#x), not %#lx with \"%s\"", (unsigned long)wc.wr_id,
        ibv_wc_status_str(wc.status), wc.vendor_err, (unsigned long)wr_id, ibv_wc_status_str(status));
}

void expect_nothing(struct session *s, struct ibv_cq *cq, int milliseconds)
{
    struct ibv_wc wc;
    double end = now() + milliseconds / 1e3;
    do
        MUST(!try_completion(s, cq, &wc), "completion %#lx with \"%s\", not nothing", (unsigned long)wc.wr_id, ibv_wc_status_str(wc.status));
    while (now() < end);
}
