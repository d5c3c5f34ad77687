//! What this process knows of its channels, ids and memberships: which events wait where, and how many were reported.
//!
//! The daemon knows ids only. One lock guards all of it, as ids move between channels; it is never held while the
//! daemon is waited for.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;

use ferroce_engine::rdma_cm::{self, Details, Event, EventKind, Id, MembershipId, PortSpace, QpKind};

use super::events;
use super::layout::rdma_ucm_event_resp;
use super::tickets::Tickets;

/// Number of a channel in this process, never used again.
pub type ChannelId = u64;

/// All channels of the process.
#[derive(Default)]
pub struct State {
    next_channel: ChannelId,
    channels: BTreeMap<ChannelId, Channel>,
    ids: BTreeMap<Id, Known>,
    memberships: BTreeMap<MembershipId, Membership>,
}

struct Channel {
    tickets: Tickets,
    queue: VecDeque<Queued>,
    /// The thread that took its last event, unless it was since waited for in vain.
    reader: Option<libc::pid_t>,
}

/// An id.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// Where its events go.
    pub channel: ChannelId,
    /// What the program calls it in events; 0 until it has accepted the request, and then there are no events.
    pub uid: u64,
    /// Port space.
    pub port_space: PortSpace,
    /// Type of its queue pairs.
    pub qp_kind: QpKind,
    /// It has been given an address of `AF_IB`.
    pub ib: bool,
    /// Its device is gone: all that can be done is to destroy it.
    pub removed: bool,
    /// What it waits for, or is.
    phase: Phase,
    reported: u32,
}

/// What an id waits for, as far as it matters when the daemon's successor does not know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Nothing.
    Idle,
    /// An address.
    Address,
    /// A route.
    Route,
    /// The peer's answer.
    Connecting,
    /// The end of the connection.
    Connected,
}

#[derive(Clone, Copy, Debug)]
struct Membership {
    id: Id,
    uid: u64,
    reported: u32,
}

/// An event that waits for the program.
struct Queued {
    id: Id,
    membership: Option<MembershipId>,
    /// The id that a connection request has made.
    new_id: Option<Id>,
    response: Box<rdma_ucm_event_resp>,
}

/// Whose events.
#[derive(Clone, Copy, Debug)]
pub enum Subject {
    /// An id's, those of its memberships and the requests that a listener has got among them.
    Id(Id),
    /// A membership's.
    Membership(MembershipId),
}

/// What is left to do with the daemon when an id was destroyed here.
#[derive(Debug, PartialEq, Eq)]
pub struct Destroyed {
    /// Events of the id that the program has got.
    pub reported: u32,
    /// Ids of connection requests that the program never gets.
    pub undelivered: Vec<Id>,
}

impl State {
    /// A new channel.
    pub fn add_channel(&mut self, tickets: Tickets) -> ChannelId {
        let channel = self.next_channel;
        self.next_channel += 1;
        let place = Channel {
            tickets,
            queue: VecDeque::new(),
            reader: None,
        };
        self.channels.insert(channel, place);
        channel
    }

    /// Ends a channel; gives the ids that are destroyed with it.
    pub fn remove_channel(&mut self, channel: ChannelId) -> Vec<Id> {
        // First, with all its events: they need not be taken out for each id.
        if let Some(channel) = self.channels.remove(&channel) {
            channel.tickets.take_back(usize::MAX);
        }
        let ids: Vec<_> = self
            .ids
            .iter()
            .filter_map(|(id, known)| (known.channel == channel).then_some(*id))
            .collect();
        for id in &ids {
            self.destroy(*id);
        }
        ids
    }

    /// Whether the channel exists.
    pub fn has_channel(&self, channel: ChannelId) -> bool {
        self.channels.contains_key(&channel)
    }

    /// A new id.
    pub fn add_id(&mut self, id: Id, channel: ChannelId, uid: u64, port_space: PortSpace, qp_kind: QpKind) {
        let known = Known {
            channel,
            uid,
            port_space,
            qp_kind,
            ib: false,
            removed: false,
            phase: Phase::Idle,
            reported: 0,
        };
        self.ids.insert(id, known);
    }

    /// An id of a channel, for a command: ENOENT if there is none, EINVAL if it is another channel's, ENXIO if its
    /// device is gone.
    pub fn id(&mut self, id: Id, channel: ChannelId) -> Result<&mut Known, c_int> {
        match self.ids.get_mut(&id) {
            None => Err(libc::ENOENT),
            Some(known) if known.channel != channel => Err(libc::EINVAL),
            Some(known) if known.removed => Err(libc::ENXIO),
            Some(known) => Ok(known),
        }
    }

    /// As [`State::id`], but any id of the channel.
    pub fn check_id(&self, id: Id, channel: ChannelId) -> Result<(), c_int> {
        match self.ids.get(&id) {
            None => Err(libc::ENOENT),
            Some(known) if known.channel != channel => Err(libc::EINVAL),
            Some(_) => Ok(()),
        }
    }

    /// Sets what the program calls an id that it has accepted.
    pub fn set_uid(&mut self, id: Id, uid: u64) {
        if let Some(known) = self.ids.get_mut(&id) {
            known.uid = uid;
        }
    }

    /// Sets what an id waits for.
    pub fn set_phase(&mut self, id: Id, phase: Phase) {
        if let Some(known) = self.ids.get_mut(&id) {
            known.phase = phase;
        }
    }

    /// A new membership.
    pub fn add_membership(&mut self, membership: MembershipId, id: Id, uid: u64) {
        if self.ids.contains_key(&id) {
            let reported = 0;
            self.memberships
                .insert(membership, Membership { id, uid, reported });
        }
    }

    /// Whether the membership is of an id of the channel: ENOENT if there is none, EINVAL if it is another channel's.
    pub fn check_membership(&self, membership: MembershipId, channel: ChannelId) -> Result<(), c_int> {
        let membership = self.memberships.get(&membership).ok_or(libc::ENOENT)?;
        self.check_id(membership.id, channel)
    }

    /// Ends a membership; gives the number of its events that the program has got.
    pub fn leave(&mut self, membership: MembershipId) -> u32 {
        let Some(left) = self.memberships.remove(&membership) else {
            return 0;
        };
        if let Some(known) = self.ids.get(&left.id)
            && let Some(channel) = self.channels.get_mut(&known.channel)
        {
            channel.retract(Subject::Membership(membership));
        }
        left.reported
    }

    /// Forgets an id, with its memberships, its events that wait, and the connection requests among these.
    pub fn destroy(&mut self, id: Id) -> Destroyed {
        let Some(known) = self.ids.remove(&id) else {
            return Destroyed {
                reported: 0,
                undelivered: Vec::new(),
            };
        };
        self.memberships.retain(|_, membership| membership.id != id);
        let retracted = self
            .channels
            .get_mut(&known.channel)
            .map(|channel| channel.retract(Subject::Id(id)))
            .unwrap_or_default();
        let undelivered: Vec<_> = retracted.iter().filter_map(|queued| queued.new_id).collect();
        for new_id in &undelivered {
            self.destroy(*new_id);
        }
        Destroyed {
            reported: known.reported,
            undelivered,
        }
    }

    /// Moves an id, its events, and the requests among these, to another channel; gives the number of its events that
    /// the program has got.
    pub fn migrate(&mut self, id: Id, from: ChannelId, to: ChannelId) -> Result<u32, c_int> {
        let known = self.id(id, from)?;
        known.channel = to;
        let reported = known.reported;
        if from == to {
            return Ok(reported);
        }
        let moved = self
            .channels
            .get_mut(&from)
            .map(|channel| channel.retract(Subject::Id(id)))
            .unwrap_or_default();
        for new_id in moved.iter().filter_map(|queued| queued.new_id) {
            if let Some(known) = self.ids.get_mut(&new_id) {
                known.channel = to;
            }
        }
        if let Some(channel) = self.channels.get_mut(&to) {
            channel.tickets.add(moved.len());
            channel.queue.extend(moved);
        }
        Ok(reported)
    }

    /// The channel of such events, if some wait there and another thread than `me` is its reader.
    pub fn left_to_reader(&self, subject: Subject, me: libc::pid_t) -> Option<ChannelId> {
        let id = match subject {
            Subject::Id(id) => id,
            Subject::Membership(membership) => self.memberships.get(&membership)?.id,
        };
        let number = self.ids.get(&id)?.channel;
        let channel = self.channels.get(&number)?;
        let other = channel.reader.is_some_and(|reader| reader != me);
        (other && channel.queue.iter().any(|queued| queued.concerns(subject))).then_some(number)
    }

    /// The channel's reader does not come for what waits: nobody is to wait for it, on any channel, until it has taken an
    /// event again.
    pub fn give_up_reader(&mut self, channel: ChannelId) {
        let gone = self.channels.get(&channel).and_then(|it| it.reader);
        for channel in self.channels.values_mut().filter(|it| it.reader == gone) {
            channel.reader = None;
        }
    }

    /// Queues an event of the daemon. Gives the id of a request whose listener was destroyed meanwhile: nobody gets it.
    pub fn deliver(&mut self, event: &Event) -> Option<Id> {
        let Some(known) = self.ids.get_mut(&event.id) else {
            return event.new_id;
        };
        let known = match event.kind {
            EventKind::ConnectRequest => {
                let new_id = event.new_id?;
                let listener = *known;
                self.add_id(new_id, listener.channel, 0, listener.port_space, listener.qp_kind);
                if let Some(known) = self.ids.get_mut(&new_id) {
                    known.ib = listener.ib;
                }
                listener
            }
            kind => {
                known.see(kind);
                *known
            }
        };
        let (number, uid) = match event.kind {
            EventKind::MulticastJoin | EventKind::MulticastError => {
                match event
                    .membership
                    .and_then(|it| Some((it, self.memberships.get(&it)?)))
                {
                    Some((number, membership)) => (number, membership.uid),
                    None => return None, // left meanwhile
                }
            }
            EventKind::ConnectRequest => (event.new_id.unwrap_or_default(), known.uid),
            _ => (event.id, known.uid),
        };
        // An event of a request that was not accepted yet: accepting it will fail.
        if uid == 0 {
            return None;
        }
        let response = events::response(event, number, uid, known.qp_kind);
        self.push(
            known.channel,
            Queued {
                id: event.id,
                membership: event.membership,
                new_id: event.new_id,
                response: Box::new(response),
            },
        );
        None
    }

    /// Queues an event that the program has made itself.
    pub fn deliver_own(
        &mut self,
        id: Id,
        channel: ChannelId,
        kind: u32,
        status: u32,
        argument: u64,
    ) -> Result<(), c_int> {
        let uid = self.id(id, channel)?.uid;
        let response = Box::new(events::own(id, uid, kind, status, argument));
        self.push(
            channel,
            Queued {
                id,
                membership: None,
                new_id: None,
                response,
            },
        );
        Ok(())
    }

    /// Tells the program that a new daemon does not know the id: as if the device had gone, in the middle of whatever
    /// the id waits for.
    pub fn lose(&mut self, id: Id) {
        let Some(known) = self.ids.get(&id) else {
            return;
        };
        let (kind, status) = match known.phase {
            Phase::Idle => (EventKind::DeviceRemoval, 0),
            Phase::Address => (EventKind::AddressError, -libc::ENODEV),
            Phase::Route => (EventKind::RouteError, -libc::ENODEV),
            Phase::Connecting => (EventKind::Unreachable, -libc::ETIMEDOUT),
            Phase::Connected => (EventKind::Disconnected, 0),
        };
        self.deliver(&Event {
            id,
            kind,
            status,
            details: Details::None,
            ece: rdma_cm::Ece::default(),
            new_id: None,
            membership: None,
        });
    }

    fn push(&mut self, channel: ChannelId, queued: Queued) {
        if let Some(channel) = self.channels.get_mut(&channel) {
            channel.queue.push_back(queued);
            channel.tickets.add(1);
        }
    }

    /// Gives the oldest event of a channel to `store`, for a ticket of the thread `me`; gives the id of the request that
    /// is so taken. `None` if there is no event: then the ticket was that of one that was removed. If `store` fails, the
    /// event stays.
    pub fn take(
        &mut self,
        channel: ChannelId,
        me: libc::pid_t,
        store: impl FnOnce(&rdma_ucm_event_resp) -> Result<(), c_int>,
    ) -> Option<Result<Option<Id>, c_int>> {
        let place = self.channels.get_mut(&channel)?;
        let first = place.queue.front()?;
        if let Err(errno) = store(&first.response) {
            place.tickets.add(1);
            return Some(Err(errno));
        }
        let taken = place.queue.pop_front()?;
        place.reader = Some(me);
        if place.queue.is_empty() {
            // Tickets without events, should a removal have met threads with tickets in their hands.
            place.tickets.take_back(usize::MAX);
        }
        if let Some(known) = self.ids.get_mut(&taken.id) {
            known.reported += 1;
        }
        if let Some(membership) = taken.membership.and_then(|it| self.memberships.get_mut(&it)) {
            membership.reported += 1;
        }
        Some(Ok(taken.new_id))
    }
}

impl Channel {
    /// Takes out such events.
    fn retract(&mut self, subject: Subject) -> Vec<Queued> {
        if !self.queue.iter().any(|queued| queued.concerns(subject)) {
            return Vec::new();
        }
        let (out, keep): (Vec<_>, Vec<_>) = std::mem::take(&mut self.queue)
            .into_iter()
            .partition(|queued| queued.concerns(subject));
        self.queue = keep.into();
        self.tickets.take_back(out.len());
        out
    }
}

impl Queued {
    fn concerns(&self, subject: Subject) -> bool {
        match subject {
            Subject::Id(id) => self.id == id,
            Subject::Membership(membership) => self.membership == Some(membership),
        }
    }
}

impl Known {
    /// Follows what an event says.
    fn see(&mut self, kind: EventKind) {
        match kind {
            EventKind::Established | EventKind::ConnectResponse => self.phase = Phase::Connected,
            EventKind::MulticastJoin | EventKind::MulticastError | EventKind::AddressChange => {}
            EventKind::DeviceRemoval => {
                self.phase = Phase::Idle;
                self.removed = true;
            }
            _ => self.phase = Phase::Idle,
        }
    }
}

#[cfg(test)]
mod tests;
