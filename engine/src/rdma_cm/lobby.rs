//! Requests that come before somebody listens for them.
//!
//! Two programs that have agreed to connect do so at the same time: one listens, the other asks. With a NIC the listener is
//! first, as whoever asks makes a queue pair before, which takes a NIC milliseconds. It takes us microseconds: then the
//! request may be first, and programs that were never refused there crash (perftest's do). So a request waits a moment.

use std::collections::VecDeque;
use std::time::Duration;

use ferroce_wire::cm::RejReason;

use super::RdmaCm;
use crate::cm::{CommId, Request, SidrRequest, Way};
use crate::time::Time;

/// How long a request waits for a listener.
pub(super) const PATIENCE: Duration = Duration::from_millis(50);
/// Most requests that wait; others are refused at once.
pub(super) const MAX_WAITING: usize = 64;

/// The requests that wait, oldest first.
#[derive(Default)]
pub(super) struct Lobby(VecDeque<Waiting>);

struct Waiting {
    until: Time,
    comm: CommId,
    asks: Asks,
}

/// A request.
pub(super) enum Asks {
    Connection(Box<Request>),
    Datagram(Box<SidrRequest>),
}

impl Asks {
    fn way(&self) -> &Way {
        match self {
            Asks::Connection(request) => &request.way,
            Asks::Datagram(request) => &request.way,
        }
    }
}

impl Lobby {
    /// When the first is to be refused.
    pub fn deadline(&self) -> Option<Time> {
        self.0.front().map(|waiting| waiting.until)
    }
}

impl RdmaCm {
    /// Nobody listens for the request: it waits, if there is room.
    pub(super) fn wait_for_listener(&mut self, now: Time, comm: CommId, asks: Asks) {
        if self.lobby.0.len() < MAX_WAITING {
            let until = now + PATIENCE;
            self.lobby.0.push_back(Waiting { until, comm, asks });
        } else {
            self.cm.refuse(now, comm, RejReason::INVALID_SERVICE_ID);
        }
    }

    /// Somebody has begun to listen.
    pub(super) fn offer_waiting(&mut self, now: Time) {
        for waiting in std::mem::take(&mut self.lobby.0) {
            let answered = match &waiting.asks {
                Asks::Connection(request) => self.offer_request(now, waiting.comm, request),
                Asks::Datagram(request) => self.offer_sidr_request(now, waiting.comm, request),
            };
            if !answered {
                self.lobby.0.push_back(waiting);
            }
        }
    }

    /// Refuses those that have waited long enough.
    pub(super) fn expire_waiting(&mut self, now: Time) {
        while self.lobby.deadline().is_some_and(|until| until <= now)
            && let Some(waiting) = self.lobby.0.pop_front()
        {
            self.cm.refuse(now, waiting.comm, RejReason::INVALID_SERVICE_ID);
        }
    }

    /// The devices have changed: nobody can be answered from one that is gone.
    pub(super) fn clear_lobby(&mut self) {
        for waiting in std::mem::take(&mut self.lobby.0) {
            let device = &waiting.asks.way().device;
            if self.devices.iter().any(|it| it.name == *device) {
                self.lobby.0.push_back(waiting);
            } else {
                self.cm.forget(waiting.comm);
            }
        }
    }

    /// The peer does not wait for an answer any more.
    pub(super) fn leave_lobby(&mut self, now: Time, comm: CommId) {
        let before = self.lobby.0.len();
        self.lobby.0.retain(|waiting| waiting.comm != comm);
        if self.lobby.0.len() < before {
            self.cm.destroy(now, comm);
        }
    }
}
