//! Keepsakes: what a process keeps of its ids, and how a later daemon takes them over.
//!
//! The bytes come back from a process, so they are not believed: what does not fit together, or is not there any more, is
//! refused.

use std::hash::Hasher;

use rustc_hash::FxHasher;
use serde::{Deserialize, Serialize};

use super::address::space_of_service;
use super::id::{Kept, State};
use super::listen::MAX_BACKLOG;
use super::multicast::MAX_MEMBERSHIPS;
use super::ports::FIRST_UNPRIVILEGED;
use super::{Address, Handle, Keepsake, Output, PortSpace, QpKind, RdmaCm, Session};
use crate::time::Time;

/// Layout of the bytes: those of another one are refused.
const LAYOUT: u8 = 1;

/// The content of a keepsake.
#[derive(Serialize, Deserialize)]
struct Saved {
    layout: u8,
    kept: Kept,
    /// What [`crate::cm::Cm::export`] gave.
    comm: Option<Vec<u8>>,
}

impl RdmaCm {
    /// Lines up the keepsakes of what has changed.
    pub(super) fn push_keepsakes(&mut self, now: Time) {
        for id in std::mem::take(&mut self.gone) {
            self.ready.push_back(Output::Keepsake {
                session: id.session,
                keepsake: Keepsake {
                    id: id.number,
                    state: None,
                },
            });
        }
        for id in std::mem::take(&mut self.dirty) {
            let Some(entry) = self.ids.get(&id) else {
                continue;
            };
            let saved = Saved {
                layout: LAYOUT,
                kept: entry.kept.clone(),
                comm: entry.comm.and_then(|comm| self.cm.export(now, comm)),
            };
            let bytes = postcard::to_stdvec(&saved).expect("an id is plain data");
            let mut hasher = FxHasher::default();
            hasher.write(&bytes);
            let hash = Some(hasher.finish());
            let entry = self.entry_mut(id);
            if entry.kept_as != hash {
                entry.kept_as = hash;
                self.ready.push_back(Output::Keepsake {
                    session: id.session,
                    keepsake: Keepsake {
                        id: id.number,
                        state: Some(bytes),
                    },
                });
            }
        }
    }

    /// Goes on with an id of an earlier daemon.
    pub(super) fn take_over(&mut self, now: Time, session: Session, keepsake: &Keepsake) -> Option<()> {
        let id = Handle::new(session, keepsake.id);
        // Even if it takes some time until it can come back.
        self.skip_numbers(session, id.number);
        let saved = match postcard::take_from_bytes::<Saved>(keepsake.state.as_ref()?) {
            Ok((saved, [])) if saved.layout == LAYOUT => saved,
            _ => return None,
        };
        let kept = saved.kept;
        if !self.is_free(id) || !self.has_room(session) || !makes_sense(&kept) {
            return None;
        }
        if kept.bound.is_some() && kept.state != State::Removed && self.device_of(&kept).is_none() {
            return None;
        }
        let connected = matches!(kept.state, State::Connect | State::Disconnect);
        if connected != saved.comm.is_some() {
            return None;
        }
        if kept
            .memberships
            .keys()
            .any(|number| *number == id.number || !self.is_free(Handle::new(session, *number)))
        {
            return None;
        }
        self.insert(id, kept);
        if self.take_port_over(id).is_none() || self.take_comm_over(now, id, saved.comm).is_none() {
            self.drop_restored(now, id);
            return None;
        }
        let memberships: Vec<_> = self.entry(id).kept.memberships.keys().copied().collect();
        for membership in memberships {
            self.memberships.insert(Handle::new(session, membership), id);
            self.hold(session, 1);
        }
        if self.entry(id).kept.state == State::AddressQuery {
            self.ask_resolver(now, id);
        }
        Some(())
    }

    fn take_port_over(&mut self, id: Handle) -> Option<()> {
        // Owned only once it is found to be free.
        let Some(space) = self.entry_mut(id).kept.owns_port.take() else {
            return Some(());
        };
        let kept = &self.entry(id).kept;
        let port = kept.source?.port();
        if port < FIRST_UNPRIVILEGED && !self.is_privileged(id) {
            return None;
        }
        let reuse = kept.reuse_address && kept.state != State::Listen;
        // A connection is known by its comm ids: that its port was given to another, who came back earlier, does not matter.
        let waits = matches!(kept.state, State::Bound | State::Listen);
        // Ids of one process are believed to have been beside each other: options may have changed since they were bound.
        let fits = self
            .ports
            .owners(space, port)
            .filter(|_| waits)
            .filter(|other| other.session != id.session)
            .map(|other| &self.entry(other).kept)
            .all(|theirs| self.fits(kept, theirs, reuse).is_ok() || self.differs(kept, theirs));
        if !fits {
            return None;
        }
        self.own_port(id, space, port);
        Some(())
    }

    fn take_comm_over(&mut self, now: Time, id: Handle, exported: Option<Vec<u8>>) -> Option<()> {
        let Some(exported) = exported else {
            return Some(());
        };
        let comm = self.cm.import(now, &exported)?;
        self.connect_comm(id, comm);
        let kept = &self.entry(id).kept;
        let way = self.cm.way(comm)?;
        let bound = kept.bound.as_ref()?;
        (way.device == bound.device).then_some(())
    }

    /// As if the id had never been taken over: its peer is not told, as it may belong to another.
    fn drop_restored(&mut self, now: Time, id: Handle) {
        if let Some(comm) = self.entry_mut(id).comm.take() {
            self.comms.remove(&comm);
            self.cm.forget(comm);
        }
        self.entry_mut(id).kept.memberships.clear();
        self.destroy(now, id);
        self.gone.pop();
    }
}

/// Whether what a keepsake says of an id fits together.
fn makes_sense(kept: &Kept) -> bool {
    let kind_fits = match kept.port_space {
        PortSpace::Tcp => kept.qp_kind == QpKind::Rc,
        PortSpace::Udp | PortSpace::Ipoib => kept.qp_kind == QpKind::Ud,
        PortSpace::Ib => true,
    };
    let has_port = kept.owns_port.is_some();
    let (source, dest, bound) = (kept.source, kept.dest, kept.bound.is_some());
    let state_fits = match kept.state {
        State::Idle => !has_port && !bound,
        State::Bound | State::Listen => has_port,
        State::AddressQuery => {
            let is_ip = |address: Option<Address>| address.is_some_and(|address| address.ip().is_some());
            has_port && is_ip(source) && is_ip(dest)
        }
        State::AddressResolved => has_port && bound && dest.is_some(),
        State::RouteResolved => has_port && bound && dest.is_some() && kept.path.is_some(),
        State::Connect | State::Disconnect => bound && source.is_some(),
        State::Removed => !has_port,
    };
    let port_fits = match (kept.owns_port, source) {
        (None, _) => true,
        (Some(_), None) => false,
        (Some(space), Some(source)) => {
            source.port() != 0 && {
                match source {
                    Address::Ip(_) => space == kept.port_space,
                    Address::Ib(ib) => {
                        space_of_service(kept.port_space, ib.service_id, ib.service_mask)
                            .is_some_and(|(of, _)| of == space)
                            && ib.service_mask == u64::MAX
                    }
                }
            }
        }
    };
    let families_fit = match (source, dest) {
        (Some(source), Some(dest)) => source.family() == dest.family(),
        _ => true,
    };
    let numbers_fit = kept.backlog <= MAX_BACKLOG
        && kept.psn <= 0xff_ffff
        && kept.qpn <= 0xff_ffff
        && kept.remote_qpn <= 0xff_ffff
        && kept.ack_timeout.is_none_or(|timeout| timeout <= 31)
        && kept.memberships.len() <= MAX_MEMBERSHIPS;
    let request_fits =
        kept.listener.is_none() || matches!(kept.state, State::Connect | State::Disconnect | State::Removed);
    let groups_fit = kept.memberships.is_empty() || (kept.is_datagram() && bound);
    kind_fits && state_fits && port_fits && families_fit && numbers_fit && request_fits && groups_fit
}
