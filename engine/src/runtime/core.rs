//! What the engine's lock protects: the device, its link, and the rounds that move packets between them.

use crate::device::{Acks, Device, Progress};
use crate::link::Link;
use crate::time::Time;
use crate::verbs::AsyncEvent;

/// The device and its link.
pub(super) struct Core {
    pub(super) device: Device,
    link: Box<dyn Link>,
    /// Packets wait for the link to become writable.
    blocked: bool,
    /// Rounds since the last that received something.
    idle_rounds: u32,
}

impl Core {
    pub(super) fn new(device: Device, link: Box<dyn Link>) -> Core {
        Core {
            device,
            link,
            blocked: false,
            idle_rounds: 0,
        }
    }

    /// One round: packets in, due timers, everything ready out. Says whether any packet came.
    pub(super) fn round(&mut self, now: Time, acks: Acks) -> bool {
        let device = &mut self.device;
        let received = match self.link.receive(&mut |packet| device.receive(now, packet)) {
            Ok(count) => count > 0,
            Err(error) => {
                tracing::debug!("receive: {error}");
                false
            }
        };
        if device.next_deadline().is_some_and(|deadline| deadline <= now) {
            device.handle_timeouts(now);
        }
        // Nobody polls so fast that an acknowledgement had better wait when nothing comes.
        self.transmit(now, if received { acks } else { Acks::Send });
        self.idle_rounds = if received {
            0
        } else {
            self.idle_rounds.wrapping_add(1)
        };
        received
    }

    /// Rounds in a row that received nothing.
    pub(super) fn idle_rounds(&self) -> u32 {
        self.idle_rounds
    }

    /// Sends whatever the device has ready, as far as the link takes it.
    pub(super) fn transmit(&mut self, now: Time, acks: Acks) {
        if self.blocked {
            // There may be room now, and who waits for it goes on.
            self.flush();
        }
        loop {
            match self.device.transmit_acks(now, &mut *self.link, acks) {
                Progress::Idle => {
                    self.flush();
                    return;
                }
                Progress::More => {}
                Progress::Full => {
                    if !self.flush() {
                        return;
                    }
                }
            }
        }
    }

    /// Pushes out what the link holds; false if the socket is full.
    fn flush(&mut self) -> bool {
        let sent = self.link.flush().unwrap_or_else(|error| {
            // Lost packets are the transport's business; its timers will notice.
            tracing::debug!("transmit: {error}");
            true
        });
        self.blocked = !sent;
        sent
    }

    /// Whether packets wait for the link to become writable.
    pub(super) fn blocked(&self) -> bool {
        self.blocked
    }

    /// Whether something is ready to be sent that found no room.
    pub(super) fn holds_back(&self) -> bool {
        self.blocked || self.device.is_busy()
    }

    /// When the transport next needs a round.
    pub(super) fn next_deadline(&self) -> Option<Time> {
        self.device.next_deadline()
    }

    /// Takes the events that came up, in order.
    pub(super) fn take_event(&mut self) -> Option<AsyncEvent> {
        self.device.take_event()
    }

    pub(super) fn link(&self) -> &dyn Link {
        &*self.link
    }

    pub(super) fn link_mut(&mut self) -> &mut dyn Link {
        &mut *self.link
    }
}
