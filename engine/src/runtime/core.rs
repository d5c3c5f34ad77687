//! What the engine's lock protects: the device, its link, and the rounds that move packets between them.

use crate::device::{Device, Progress};
use crate::link::Link;
use crate::time::Time;
use crate::verbs::AsyncEvent;

use super::clock;

/// The most batches received in one round, so that a flood can't keep one caller for ever.
const BATCHES_PER_ROUND: usize = 4;

/// The device and its link.
pub(super) struct Core {
    pub(super) device: Device,
    link: Box<dyn Link>,
    /// Packets wait for the link to become writable.
    blocked: bool,
}

impl Core {
    pub(super) fn new(device: Device, link: Box<dyn Link>) -> Core {
        Core {
            device,
            link,
            blocked: false,
        }
    }

    /// One round: packets in, due timers, everything ready out. Says whether any packet came.
    pub(super) fn round(&mut self) -> bool {
        let mut received = false;
        for _ in 0..BATCHES_PER_ROUND {
            let now = clock::now();
            let device = &mut self.device;
            let count = match self.link.receive(&mut |packet| device.receive(now, packet)) {
                Ok(count) => count,
                Err(error) => {
                    tracing::debug!("receive: {error}");
                    0
                }
            };
            if self
                .device
                .next_deadline()
                .is_some_and(|deadline| deadline <= now)
            {
                self.device.handle_timeouts(now);
            }
            self.transmit(now);
            if count == 0 {
                break;
            }
            received = true;
        }
        received
    }

    /// Sends whatever the device has ready, as far as the link takes it.
    pub(super) fn transmit(&mut self, now: Time) {
        loop {
            match self.device.transmit(now, &mut *self.link) {
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
}
