//! Requests that come before somebody listens for them.
//!
//! Two programs that have agreed to connect do so at the same time: one listens, the other asks. With a NIC the listener is
//! first, as whoever asks makes a queue pair before, which takes a NIC milliseconds. It takes us microseconds: then the
//! request may be first, and programs that were never refused there crash (perftest's do). So a request waits a moment.

use std::collections::VecDeque;
use std::time::Duration;

use ferroce_wire::cm::ip_header;

use super::listen::Miss;
use super::{PortSpace, RdmaCm};
use crate::cm::{CommId, Request, SidrRequest, Way};
use crate::time::Time;

/// How long a request waits for a listener.
pub(super) const PATIENCE: Duration = Duration::from_millis(50);
/// Most requests that wait; others are refused at once.
pub(super) const MAX_WAITING: usize = 1024;

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
    pub fn way(&self) -> &Way {
        match self {
            Asks::Connection(request) => &request.way,
            Asks::Datagram(request) => &request.way,
        }
    }

    /// Port space and port, if it is for any.
    pub fn service(&self) -> Option<(PortSpace, u16)> {
        let service_id = match self {
            Asks::Connection(request) => request.message.service_id,
            Asks::Datagram(request) => request.message.service_id,
        };
        let (space, port) = ip_header::port_of_service(service_id)?;
        Some((PortSpace::from_number(space as u32)?, port))
    }
}

impl Lobby {
    /// When the first has waited long enough.
    pub fn deadline(&self) -> Option<Time> {
        self.0.front().map(|waiting| waiting.until)
    }
}

impl RdmaCm {
    /// A REQ or SIDR_REQ has come.
    pub(super) fn request_came(&mut self, now: Time, comm: CommId, asks: Asks) {
        match self.offer(comm, &asks) {
            Ok(()) => {}
            Err(Miss::Listener | Miss::Address) if self.lobby.0.len() < MAX_WAITING => {
                let until = now + PATIENCE;
                self.lobby.0.push_back(Waiting { until, comm, asks });
            }
            Err(miss) => self.turn_away(now, comm, &asks, miss),
        }
    }

    /// Somebody has begun to listen at a port.
    pub(super) fn offer_waiting(&mut self, now: Time, space: PortSpace, port: u16) {
        for waiting in std::mem::take(&mut self.lobby.0) {
            if waiting.asks.service() != Some((space, port)) {
                self.lobby.0.push_back(waiting);
                continue;
            }
            match self.offer(waiting.comm, &waiting.asks) {
                Ok(()) => {}
                Err(Miss::Listener | Miss::Address) => self.lobby.0.push_back(waiting),
                Err(miss) => self.turn_away(now, waiting.comm, &waiting.asks, miss),
            }
        }
    }

    /// Refuses those that have waited long enough, but for those whose listener has come from an earlier daemon.
    pub(super) fn expire_waiting(&mut self, now: Time) {
        while self.lobby.deadline().is_some_and(|until| until <= now)
            && let Some(waiting) = self.lobby.0.pop_front()
        {
            if let Err(miss) = self.offer(waiting.comm, &waiting.asks) {
                self.turn_away(now, waiting.comm, &waiting.asks, miss);
            }
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
