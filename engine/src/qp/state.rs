//! The QP state machine: which transitions exist, and which attributes each needs and allows (IBTA 10.3, 11.2.5.2).
//!
//! Where the specification leaves a choice, the table is that of Linux: RESET does not go to ERR, and a rate limit is for
//! raw packets.

use crate::verbs::{QpAttrMask as M, QpState, QpType, VerbsError};

/// Attributes of a transition: (required, optional), without `STATE`.
type Rule = (M, M);

const NONE: M = M::empty();

/// Whether a QP of this type may go from `from` to `to` setting just these attributes: EINVAL if not.
pub(crate) fn check_transition(
    qp_type: QpType,
    from: QpState,
    to: QpState,
    mask: M,
) -> Result<(), VerbsError> {
    let (required, optional) = rule(qp_type, from, to).ok_or(VerbsError::Invalid)?;
    let allowed = required | optional | M::STATE;
    if mask.contains(required) && allowed.contains(mask) {
        Ok(())
    } else {
        Err(VerbsError::Invalid)
    }
}

/// The attributes that count: those of the half that an XRC QP lacks are not looked at, as programs set them all.
pub(crate) fn relevant(qp_type: QpType, mask: M) -> M {
    match qp_type {
        QpType::XrcSend => mask - (M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER),
        QpType::XrcRecv => mask - (M::MAX_QP_RD_ATOMIC | M::RETRY_CNT | M::RNR_RETRY),
        _ => mask,
    }
}

/// What a transition needs and allows; `None` if there is no such transition.
fn rule(qp_type: QpType, from: QpState, to: QpState) -> Option<Rule> {
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    let initiator = matches!(qp_type, QpType::Rc | QpType::XrcSend);
    let target = matches!(qp_type, QpType::Rc | QpType::XrcRecv);
    let ud = qp_type == QpType::Ud;
    let when = |condition: bool, mask: M| if condition { mask } else { NONE };
    // What a type is opened with, and may change as long as it stays connected.
    let base = M::PKEY_INDEX | M::PORT | if ud { M::QKEY } else { M::ACCESS_FLAGS };
    let live = if ud {
        M::QKEY
    } else {
        M::ACCESS_FLAGS | M::ALT_PATH | M::PATH_MIG_STATE
    };
    let running = M::CUR_STATE | live | when(target, M::MIN_RNR_TIMER);
    Some(match (from, to) {
        (Reset, Err) => return None,
        (_, Reset | Err) => (NONE, NONE),
        (Reset, Init) => (base, NONE),
        (Init, Init) => (NONE, base),
        (Init, Rtr) if ud => (NONE, M::PKEY_INDEX | M::QKEY),
        (Init, Rtr) => (
            M::AV
                | M::PATH_MTU
                | M::DEST_QPN
                | M::RQ_PSN
                | when(target, M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER),
            M::ALT_PATH | M::ACCESS_FLAGS | M::PKEY_INDEX,
        ),
        (Rtr, Rts) => (
            M::SQ_PSN
                | when(qp_type == QpType::XrcRecv, M::TIMEOUT)
                | when(
                    initiator,
                    M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC,
                ),
            running,
        ),
        (Rts, Rts) => (NONE, running),
        (Rts, Sqd) => (NONE, M::EN_SQD_ASYNC_NOTIFY),
        (Sqd, Rts) => (NONE, running),
        (Sqd, Sqd) if ud => (NONE, M::PKEY_INDEX | M::QKEY),
        (Sqd, Sqd) => (
            NONE,
            live | M::AV
                | M::PKEY_INDEX
                | when(initiator || target, M::PORT | M::TIMEOUT)
                | when(initiator, M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC)
                | when(target, M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER),
        ),
        (Sqe, Rts) if ud => (NONE, M::CUR_STATE | M::QKEY),
        (Sqe, Rts) if qp_type == QpType::Uc => (NONE, M::CUR_STATE | M::ACCESS_FLAGS),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTR: M = M::STATE
        .union(M::AV)
        .union(M::PATH_MTU)
        .union(M::DEST_QPN)
        .union(M::RQ_PSN);
    const RC_RTR: M = RTR.union(M::MAX_DEST_RD_ATOMIC).union(M::MIN_RNR_TIMER);
    const INIT: M = M::STATE.union(M::PKEY_INDEX).union(M::PORT);

    fn ok(t: QpType, from: QpState, to: QpState, mask: M) -> bool {
        check_transition(t, from, to, mask).is_ok()
    }

    #[test]
    fn required_attributes() {
        assert!(ok(
            QpType::Rc,
            QpState::Reset,
            QpState::Init,
            INIT | M::ACCESS_FLAGS
        ));
        assert!(!ok(QpType::Rc, QpState::Reset, QpState::Init, INIT));
        assert!(!ok(
            QpType::Rc,
            QpState::Reset,
            QpState::Init,
            INIT | M::ACCESS_FLAGS | M::QKEY
        ));
        assert!(ok(QpType::Ud, QpState::Reset, QpState::Init, INIT | M::QKEY));
        assert!(ok(QpType::Uc, QpState::Init, QpState::Rtr, RTR));
        assert!(!ok(QpType::Rc, QpState::Init, QpState::Rtr, RTR));
        for missing in [M::AV, M::PATH_MTU, M::DEST_QPN, M::RQ_PSN, M::MIN_RNR_TIMER] {
            assert!(!ok(QpType::Rc, QpState::Init, QpState::Rtr, RC_RTR - missing));
        }
        assert!(ok(QpType::Rc, QpState::Init, QpState::Rtr, RC_RTR));
        assert!(ok(QpType::Ud, QpState::Rtr, QpState::Rts, M::STATE | M::SQ_PSN));
        assert!(!ok(QpType::Rc, QpState::Rtr, QpState::Rts, M::STATE | M::SQ_PSN));
    }

    #[test]
    fn halves_of_xrc() {
        let sending = M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC;
        for (half, rtr, rts) in [
            (QpType::XrcSend, RTR, sending),
            (QpType::XrcRecv, RC_RTR, M::TIMEOUT),
        ] {
            assert!(ok(half, QpState::Init, QpState::Rtr, rtr));
            let rts = M::STATE | M::SQ_PSN | rts;
            assert!(ok(half, QpState::Rtr, QpState::Rts, rts));
            assert!(!ok(half, QpState::Rtr, QpState::Rts, rts - M::TIMEOUT));
            assert_eq!(relevant(half, RC_RTR), rtr, "RC's attributes do for both halves");
            assert_eq!(relevant(half, M::STATE | M::SQ_PSN | sending), rts);
        }
    }

    #[test]
    fn transitions_that_do_not_exist() {
        use QpState::*;
        let all = [Reset, Init, Rtr, Rts, Sqd, Sqe, Err];
        for from in all {
            assert!(ok(QpType::Rc, from, Reset, M::STATE));
            assert_eq!(ok(QpType::Ud, from, Err, M::STATE), from != Reset);
            assert!(!ok(QpType::Rc, from, Err, M::STATE | M::QKEY));
            assert!(!ok(QpType::Rc, from, Sqe, M::STATE));
        }
        assert!(!ok(QpType::Rc, Reset, Rtr, RC_RTR));
        assert!(!ok(QpType::Rc, Init, Rts, M::all()));
        assert!(!ok(QpType::Rc, Err, Init, INIT | M::ACCESS_FLAGS));
        assert!(!ok(QpType::Rc, Sqe, Rts, M::STATE));
        assert!(ok(QpType::Uc, Sqe, Rts, M::STATE));
    }
}
