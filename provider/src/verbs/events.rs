//! Asynchronous events: from the engine, by the number of an object, to the program, by its address.

use std::cell::UnsafeCell;
use std::collections::HashMap;

use ferroce_engine::runtime::Guest;
use ferroce_engine::verbs::AsyncEvent;
use parking_lot::Mutex;

use super::context::Context;
use crate::abi::verbs::{ibv_context, ibv_cq, ibv_qp, ibv_srq};
use crate::guard::guard;

/// An object that asynchronous events can concern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Object {
    /// A CQ, by its id.
    Cq(u64),
    /// A QP, by its number.
    Qp(u32),
    /// An SRQ, by its id.
    Srq(u32),
}

/// The objects of a context: the addresses of each, and how many events they have got. All have one address, but XRC
/// targets as many as they were opened times.
#[derive(Default)]
pub struct Objects(Mutex<HashMap<Object, Vec<(u64, u32)>>>);

impl Objects {
    /// Adds an object, at an address by which the program knows it.
    pub fn insert(&self, object: Object, address: u64) {
        self.0.lock().entry(object).or_default().push((address, 0));
    }

    /// Counts an event for an object; `told` gets its addresses.
    fn count(&self, object: Object, mut told: impl FnMut(u64)) {
        let mut objects = self.0.lock();
        for (address, events) in objects.get_mut(&object).into_iter().flatten() {
            *events = events.wrapping_add(1);
            told(*address);
        }
    }

    /// Removes an address of an object; gives how many events it has got.
    fn remove(&self, object: Object, address: u64) -> Option<u32> {
        let mut objects = self.0.lock();
        let places = objects.get_mut(&object)?;
        let place = places.iter().position(|(at, _)| *at == address)?;
        let (_, events) = places.swap_remove(place);
        if places.is_empty() {
            objects.remove(&object);
        }
        Some(events)
    }
}

impl Context {
    /// Hands an event of the engine to the program, unless it concerns another context's object.
    pub(super) fn publish(&self, event: &AsyncEvent) {
        let (object, kind) = match *event {
            AsyncEvent::CqError(cq) => (Some(Object::Cq(cq)), 0),
            AsyncEvent::QpFatal(qp) => (Some(Object::Qp(qp)), 1),
            AsyncEvent::QpRequestError(qp) => (Some(Object::Qp(qp)), 2),
            AsyncEvent::QpAccessError(qp) => (Some(Object::Qp(qp)), 3),
            AsyncEvent::CommEstablished(qp) => (Some(Object::Qp(qp)), 4),
            AsyncEvent::SqDrained(qp) => (Some(Object::Qp(qp)), 5),
            AsyncEvent::DeviceFatal => (None, 8),
            AsyncEvent::PortActive => (None, 9),
            AsyncEvent::PortError => (None, 10),
            AsyncEvent::SrqError(srq) => (Some(Object::Srq(srq)), 14),
            AsyncEvent::SrqLimit(srq) => (Some(Object::Srq(srq)), 15),
            AsyncEvent::LastWqeReached(qp) => (Some(Object::Qp(qp)), 16),
            AsyncEvent::GidChange => (None, 18),
        };
        match object {
            None => self.events.push([super::context::PORT.into(), kind]),
            Some(object) => self
                .objects
                .count(object, |address| self.events.push([address, kind])),
        }
    }

    /// Ends the events of an object that is destroyed, by the address that the program has of it, and waits until the
    /// program has acknowledged those it read.
    ///
    /// # Safety
    /// `acknowledged` must be of that object and address.
    pub(super) unsafe fn forget(&self, object: Object, address: u64, acknowledged: Acknowledged) {
        let Some(events) = self.objects.remove(object, address) else {
            return;
        };
        let unread = self
            .events
            .retract(|[element, kind]| *element == address && concerns_object(*kind));
        // SAFETY: as the caller says.
        unsafe { acknowledged.wait_for(events.wrapping_sub(unread)) };
    }
}

/// Whether the element of an event of this type is an object, not a port.
fn concerns_object(kind: u64) -> bool {
    matches!(kind, 0..=7 | 14..=16)
}

/// Where libibverbs counts the acknowledged events of an object.
pub(super) struct Acknowledged {
    mutex: *mut libc::pthread_mutex_t,
    cond: *mut libc::pthread_cond_t,
    count: *const u32,
}

impl Acknowledged {
    /// Asynchronous events of a QP.
    pub fn of_qp(qp: *mut ibv_qp) -> Acknowledged {
        // SAFETY: only addresses within the object are taken.
        unsafe {
            Acknowledged {
                mutex: &raw mut (*qp).mutex,
                cond: &raw mut (*qp).cond,
                count: &raw const (*qp).events_completed,
            }
        }
    }

    /// Asynchronous events of an SRQ.
    pub fn of_srq(srq: *mut ibv_srq) -> Acknowledged {
        // SAFETY: only addresses within the object are taken.
        unsafe {
            Acknowledged {
                mutex: &raw mut (*srq).mutex,
                cond: &raw mut (*srq).cond,
                count: &raw const (*srq).events_completed,
            }
        }
    }

    /// Asynchronous events of a CQ.
    pub fn of_cq(cq: *mut ibv_cq) -> Acknowledged {
        // SAFETY: only addresses within the object are taken.
        let count = unsafe { &raw const (*cq).async_events_completed };
        Acknowledged {
            count,
            ..Self::of_completions(cq)
        }
    }

    /// Completion events of a CQ.
    pub fn of_completions(cq: *mut ibv_cq) -> Acknowledged {
        // SAFETY: only addresses within the object are taken.
        unsafe {
            Acknowledged {
                mutex: &raw mut (*cq).mutex,
                cond: &raw mut (*cq).cond,
                count: &raw const (*cq).comp_events_completed,
            }
        }
    }

    /// Waits until `events` are acknowledged.
    ///
    /// # Safety
    /// The object must live, and its mutex and condition variable be initialised.
    pub unsafe fn wait_for(&self, events: u32) {
        // A wait can be cancelled, and would be where the object is half destroyed.
        let _guest = Guest::enter();
        // SAFETY: as the caller says; libibverbs counts under this mutex.
        unsafe {
            libc::pthread_mutex_lock(self.mutex);
            while self.count.read_volatile() != events {
                libc::pthread_cond_wait(self.cond, self.mutex);
            }
            libc::pthread_mutex_unlock(self.mutex);
        }
    }
}

/// The program has read an asynchronous event: there is room for one that waits.
pub(super) unsafe extern "C" fn async_event(context: *mut ibv_context, _: *mut std::ffi::c_void) {
    // SAFETY: libibverbs passes an open context of this provider.
    guard((), || unsafe { Context::of(context) }.events.refill());
}

/// The public part of an object. The program and libibverbs read and write it at any time.
#[repr(transparent)]
pub(super) struct Public<T>(UnsafeCell<T>);

// SAFETY: Rust code reaches it only by raw pointers.
unsafe impl<T> Sync for Public<T> {}
// SAFETY: as above.
unsafe impl<T> Send for Public<T> {}

impl<T> Public<T> {
    /// An object of zeros, as libibverbs makes those that it makes itself.
    ///
    /// # Safety
    /// Zeros must be a value of `T`.
    pub unsafe fn zeroed() -> Public<T> {
        // SAFETY: as the caller says.
        Public(UnsafeCell::new(unsafe { std::mem::zeroed() }))
    }

    /// Its address.
    pub fn get(&self) -> *mut T {
        self.0.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_counted_for_its_object() {
        let objects = Objects::default();
        objects.insert(Object::Qp(7), 0x1000);
        objects.insert(Object::Srq(7), 0x2000);
        let count = |object| {
            let mut told = Vec::new();
            objects.count(object, |address| told.push(address));
            told
        };
        assert_eq!(count(Object::Qp(7)), [0x1000]);
        objects.insert(Object::Qp(7), 0x3000);
        assert_eq!(
            count(Object::Qp(7)),
            [0x1000, 0x3000],
            "a target that was opened again"
        );
        assert_eq!(count(Object::Cq(7)), []);
        assert_eq!(objects.remove(Object::Qp(7), 0x1000), Some(2));
        assert_eq!(objects.remove(Object::Qp(7), 0x1000), None);
        assert_eq!(objects.remove(Object::Qp(7), 0x3000), Some(1));
        assert_eq!(objects.remove(Object::Srq(7), 0x2000), Some(0));
        assert!(objects.0.lock().is_empty());
    }

    #[test]
    fn waits_for_the_acknowledgements() {
        // SAFETY: zeros are an initialised mutex and condition variable here, as PTHREAD_MUTEX_INITIALIZER is.
        let qp = unsafe { Public::<ibv_qp>::zeroed() };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..2 {
                    // SAFETY: as libibverbs does in ibv_ack_async_event.
                    unsafe {
                        libc::pthread_mutex_lock(&raw mut (*qp.get()).mutex);
                        (*qp.get()).events_completed += 1;
                        libc::pthread_cond_signal(&raw mut (*qp.get()).cond);
                        libc::pthread_mutex_unlock(&raw mut (*qp.get()).mutex);
                    }
                }
            });
            // SAFETY: the object lives.
            unsafe { Acknowledged::of_qp(qp.get()).wait_for(2) };
        });
        // SAFETY: nobody else has it any more.
        assert_eq!(unsafe { (*qp.get()).events_completed }, 2);
    }
}
