//! RDMA CM for clients: their sessions, who may name which queue pair, and the turn of what comes from outside.

use std::time::{Duration, Instant};

use ferroce_engine::control::{DAEMON_SLOT, DeviceInfo};
use ferroce_engine::rdma_cm::{Command, Keepsake};
use ferroce_wire::mad::GSI_QPN;
use tracing::{debug, warn};

use super::super::Source;
use super::super::cm::{Letters, RESTORE_TIME};
use super::Server;

impl Server {
    /// Does a command of RDMA CM.
    pub(super) fn cm_command(&mut self, id: u32, sequence: u32, command: Command) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        let uid = connection.peer.uid;
        let refused = match &command {
            Command::Connect { parameters, .. }
            | Command::Accept {
                parameters: Some(parameters),
                ..
            } => !self.may_name(id, parameters.qpn),
            _ => false,
        };
        let letters = if refused {
            self.cm.refuse(id, uid, sequence, libc::EINVAL)
        } else {
            self.cm.command(id, uid, sequence, command)
        };
        self.deliver(letters);
    }

    /// Whether the client `id` may have a peer told of this queue pair: those of programs of its own user, as a forked
    /// child or a helper may speak for another; root any. 0 stands for none, and the other numbers of our own slot are
    /// nobody's: `cmtime` counts connections without queue pairs, under numbers from 1000 on.
    fn may_name(&self, id: u32, qpn: u32) -> bool {
        let Some(client) = self.connections.get(&id) else {
            return false;
        };
        let slot = (qpn >> 16) as u8;
        let holder = self
            .connections
            .values()
            .find(|it| it.lease.as_ref().is_some_and(|lease| lease.slot == slot));
        match holder {
            _ if slot == DAEMON_SLOT => qpn & 0xff_ffff != GSI_QPN,
            Some(holder) => client.peer.uid == 0 || client.peer.uid == holder.peer.uid,
            // Its program, of an earlier daemon's time, has not come to us yet.
            None => client.is_owner() && self.presumed.contains(&slot),
        }
    }

    /// Goes on with ids of an earlier daemon. Keepsakes of those who do not have the heirloom either are not trusted:
    /// they could be forged, to stand in for another user's listener or connection.
    pub(super) fn cm_restore(&mut self, id: u32, keepsakes: Vec<Keepsake>) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        let uid = connection.peer.uid;
        let letters = if connection.is_owner() {
            let patience = if self.presumed.is_empty() {
                Duration::ZERO
            } else {
                RESTORE_TIME
            };
            self.cm.restore(id, uid, keepsakes, patience)
        } else {
            self.cm.refuse_restore(id, uid, &keepsakes)
        };
        self.deliver(letters);
    }

    /// A lease goes on, and with it its device.
    pub(super) fn lease_goes_on(&mut self) {
        let letters = self.cm.go_on_restoring();
        self.deliver(letters);
    }

    /// Tells RDMA CM how the devices are now.
    pub(super) fn tell_cm_of_devices(&mut self) {
        let devices: Vec<DeviceInfo> = self.devices.iter().cloned().collect();
        let letters = self.cm.set_devices(&devices);
        self.deliver(letters);
    }

    /// Sends programs, and then peers, what RDMA CM has to say to them.
    pub(super) fn deliver(&mut self, letters: Letters) {
        let mut last = None;
        for (session, reply) in letters {
            if let Some(connection) = self.connections.get_mut(&session) {
                connection.send(&reply);
            }
            // One flush for all that one program is told in a row.
            if last.is_some_and(|last| last != session) {
                last.into_iter().for_each(|last| self.flush(last));
            }
            last = Some(session);
        }
        if let Some(last) = last {
            self.flush(last);
        }
        self.cm.transmit();
    }

    /// Takes datagrams for queue pair 1.
    pub fn mads(&mut self) {
        let (letters, received) = self.cm.arrivals();
        self.deliver(letters);
        if let Err(error) = received {
            warn!(%error, "MADs can't be received");
        }
        if self.mads_paused.is_none()
            && let Some(until) = self.cm.paused_until()
        {
            debug!("more MADs than are taken in a second");
            self.mads_paused = Some(until);
            self.listen_for_mads(false);
        }
    }

    /// Takes news of neighbours.
    pub fn neighbours(&mut self) {
        match self.cm.neighbours() {
            Ok(letters) => self.deliver(letters),
            Err(error) => warn!(%error, "news of neighbours can't be read"),
        }
    }

    /// Does what is due of RDMA CM.
    pub(super) fn expire_cm(&mut self, now: Instant) {
        if self.mads_paused.is_some_and(|until| until <= now) {
            self.mads_paused = self.cm.paused_until();
            if self.mads_paused.is_none() {
                self.listen_for_mads(true);
            }
        }
        if self.cm.is_due() {
            let letters = self.cm.expire();
            self.deliver(letters);
        }
    }

    fn listen_for_mads(&self, wanted: bool) {
        let Some(socket) = self.sockets.own() else { return };
        if let Err(error) = self.poll.want_read(socket, Source::Mads, wanted) {
            warn!(%error, "queue pair 1 can't be waited for");
        }
    }
}
