//! Queue pairs: attributes, queues, and the two halves of the transport.

mod attr;
mod flush;
mod post;
mod state;
mod unpolled;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

use ferroce_wire::TransportClass;
use rustc_hash::FxHashMap;

use self::unpolled::Unpolled;
use crate::device::{Counters, DomainId, PdId, SrqId, XrcdId};
use crate::memory::Memory;
use crate::memory::keys::{KeyTable, Scope};
use crate::queue::Cq;
use crate::queue::rq::RecvQueue;
use crate::queue::sq::SendQueue;
use crate::queue::srq::Srq;
use crate::time::Time;
use crate::transport::budget::{Budgets, Place, Standing};
use crate::transport::requester::Requester;
use crate::transport::responder::{Parting, Responder};
use crate::transport::window::PacketCost;
use crate::verbs::{AsyncEvent, QpAttr, QpCap, QpState, QpType, VerbsError, Wc};

/// How a QP is made.
#[derive(Clone, Debug)]
pub struct QpInit {
    /// Protection domain; XRC targets have none.
    pub pd: Option<PdId>,
    /// Transport.
    pub qp_type: QpType,
    /// Queue sizes wanted, or granted (query).
    pub cap: QpCap,
    /// Where sends complete; XRC targets have none.
    pub send_cq: Option<Arc<Cq>>,
    /// Where receives complete; XRC QPs have none.
    pub recv_cq: Option<Arc<Cq>>,
    /// Receives come from this SRQ instead of the QP's own queue.
    pub srq: Option<SrqId>,
    /// XRC targets only: receives come from the SRQ of this domain that the peer names.
    pub xrcd: Option<XrcdId>,
    /// Every send gives a completion.
    pub sq_sig_all: bool,
}

/// The parts of the device that a QP works with.
pub(crate) struct Shared<'a> {
    pub now: Time,
    pub memory: &'a dyn Memory,
    pub keys: &'a mut KeyTable,
    pub srqs: &'a mut FxHashMap<SrqId, Srq>,
    pub events: &'a mut VecDeque<AsyncEvent>,
    pub counters: &'a mut Counters,
    pub cost: &'a PacketCost,
    pub budgets: &'a mut Budgets,
    /// Answers that do not wait for their QPs' turns.
    pub partings: &'a mut Vec<Parting>,
    /// CQs that lost a completion, and the QP that it was of.
    pub overrun: &'a mut Vec<(u64, u32)>,
    /// When CQs want [`Cq::expire`].
    pub cq_alarms: &'a mut BinaryHeap<Reverse<(Time, u64)>>,
}

/// How a QP's turn to send ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Nothing more to send now.
    Idle,
    /// The quantum is used up.
    More,
    /// The link is full.
    Full,
    /// There is no room where the next packet goes; other QPs may go on.
    Busy,
}

/// Whether an acknowledgement that is all there is to send waits for company.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AckWait {
    No,
    Waits,
    /// It has waited: the next turn takes it.
    Over,
}

/// A queue pair.
pub(crate) struct Qp {
    pub qpn: u32,
    pub init: QpInit,
    /// The protection domain, or none.
    pub pd: PdId,
    /// XRC targets only: the domain, and the openings of it that the QP was made and opened with.
    pub domain: Option<DomainId>,
    pub opened: Vec<XrcdId>,
    pub attr: QpAttr,
    pub state: QpState,
    /// Payload bytes of a full packet.
    pub mtu: u32,
    pub sq: SendQueue,
    pub rq: RecvQueue,
    pub requester: Requester,
    pub responder: Responder,
    /// Completions of sends and of receives that wait in their CQs.
    pub unpolled: [Unpolled; 2],
    /// The fatal error is told (until RESET).
    pub fatal: bool,
    /// It waits in the device's list of QPs with something to send.
    pub queued: bool,
    pub ack_wait: AckWait,
    /// The application sends what acknowledgements can travel with: it did so since one last waited.
    pub answers: bool,
    /// When an acknowledgement left alone last.
    pub acknowledged_at: Time,
    /// What it has under way to receive buffers.
    pub standing: Standing,
    /// Its place in the line for a buffer.
    pub place: Option<Place>,
    /// Multicast groups that it is attached to.
    pub groups: u32,
    /// When the earliest entry of the device's timer heap for this QP is due.
    pub alarm: Option<Time>,
}

impl Qp {
    /// A QP in RESET. `domain`: of XRC targets. ENOMEM.
    pub fn new(qpn: u32, init: QpInit, domain: Option<DomainId>, mtu: u32) -> Result<Qp, VerbsError> {
        let cap = init.cap;
        let ud = (init.qp_type == QpType::Ud).then_some(crate::transport::ud::NOWHERE);
        let pd = init.pd.unwrap_or(PdId::NONE);
        Ok(Qp {
            qpn,
            pd,
            domain,
            opened: init.xrcd.into_iter().collect(),
            attr: QpAttr {
                cap,
                ..QpAttr::default()
            },
            state: QpState::Reset,
            mtu,
            sq: SendQueue::new(cap.max_send_wr, cap.max_send_sge, cap.max_inline_data, ud)?,
            rq: RecvQueue::new(cap.max_recv_wr, cap.max_recv_sge)?,
            requester: Requester::default(),
            responder: Responder::new(cap.max_recv_sge, pd, init.srq),
            unpolled: [Unpolled::new(cap.max_send_wr)?, Unpolled::new(cap.max_recv_wr)?],
            fatal: false,
            queued: false,
            ack_wait: AckWait::No,
            answers: false,
            acknowledged_at: Time::ZERO,
            standing: Standing::default(),
            place: None,
            groups: 0,
            alarm: None,
            init,
        })
    }

    /// The class of opcodes that it speaks.
    pub fn class(&self) -> TransportClass {
        match self.init.qp_type {
            QpType::Rc => TransportClass::Rc,
            QpType::Uc => TransportClass::Uc,
            QpType::Ud => TransportClass::Ud,
            QpType::XrcSend | QpType::XrcRecv => TransportClass::Xrc,
        }
    }

    /// Which keys it and its peer may use, by the newest request.
    pub fn scope(&self) -> Scope {
        self.scope_of(self.responder.pd)
    }

    /// Which keys its peer may use by a request whose memory is of this domain.
    pub fn scope_of(&self, pd: PdId) -> Scope {
        Scope { pd, qpn: self.qpn }
    }

    /// Whether packets are acknowledged: RC and XRC.
    pub fn is_reliable(&self) -> bool {
        matches!(self.init.qp_type, QpType::Rc | QpType::XrcSend | QpType::XrcRecv)
    }

    /// Whether there may be something to send now.
    pub fn has_work(&self) -> bool {
        self.responder.has_response() || self.sends() && self.requester.has_work()
    }

    /// Whether all there is to send is an acknowledgement, which may wait a little for company.
    pub fn has_only_ack(&self) -> bool {
        self.responder.owes_only_ack() && !(self.sends() && self.requester.has_work())
    }

    /// When a timer runs out.
    pub fn deadline(&self) -> Option<Time> {
        let look_at = self.place.map(|place| place.look_at);
        self.requester.deadline().into_iter().chain(look_at).min()
    }

    /// Whether packets are taken.
    pub fn receives(&self) -> bool {
        matches!(
            self.state,
            QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe
        )
    }

    /// Puts a completion of a send into its CQ.
    pub fn push_send(&mut self, shared: &mut Shared<'_>, wc: Wc) {
        if let Some(cq) = &self.init.send_cq
            && let Some(number) = push(shared, cq, self.qpn, wc, false)
        {
            self.unpolled[0].pushed(number, cq);
        }
    }

    /// Puts a completion of a receive into its CQ: the QP's, or that of the XRC SRQ it was of.
    pub fn push_recv(&mut self, shared: &mut Shared<'_>, wc: Wc, solicited: bool) {
        if self.init.qp_type != QpType::XrcRecv {
            if let Some(cq) = &self.init.recv_cq
                && let Some(number) = push(shared, cq, self.qpn, wc, solicited)
                && self.init.srq.is_none()
            {
                self.unpolled[1].pushed(number, cq);
            }
            return;
        }
        let id = self.responder.srq;
        let srq = id.and_then(|id| shared.srqs.get(&id));
        if let (Some(SrqId(srqn)), Some(xrc)) = (id, srq.and_then(|srq| srq.xrc.as_ref())) {
            let (cq, src_qp) = (xrc.cq.clone(), self.attr.dest_qpn);
            let wc = Wc { srqn, src_qp, ..wc };
            push(shared, &cq, self.qpn, wc, solicited);
        }
    }
}

/// Puts a completion of a QP into a CQ; gives its number there, unless it is lost.
fn push(shared: &mut Shared<'_>, cq: &Cq, qpn: u32, wc: Wc, solicited: bool) -> Option<u64> {
    let wc = Wc {
        qp_num: qpn,
        timestamp: shared.now.as_nanos(),
        ..wc
    };
    match cq.push(wc, solicited) {
        Ok(pushed) => {
            if let Some(alarm) = pushed.alarm {
                shared.cq_alarms.push(Reverse((alarm, cq.id())));
            }
            Some(pushed.number)
        }
        Err(overrun) => {
            if overrun.first {
                shared.events.push_back(AsyncEvent::CqError(cq.id()));
            }
            shared.overrun.push((cq.id(), qpn));
            None
        }
    }
}
