//! Where objects of this provider live: on the heap, or where the allocator of a parent domain puts them.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::c_void;
use std::ptr;

use ferroce_engine::runtime::Guest;
use ferroce_engine::verbs::VerbsError;

use super::pd::Pd;
use super::uses::Use;
use crate::abi::verbs::{IBV_ALLOCATOR_USE_DEFAULT, ibv_alloc_fn, ibv_free_fn, ibv_pd};

/// What allocators are asked for; the numbers have no driver's id in their upper half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Resource {
    /// A queue pair.
    Qp = 1,
    /// A shared receive queue.
    Srq = 4,
    /// A completion queue.
    Cq = 5,
}

/// The allocator of a parent domain.
#[derive(Clone, Copy)]
pub struct Allocator {
    pub(super) alloc: ibv_alloc_fn,
    pub(super) free: ibv_free_fn,
    /// The parent domain.
    pub(super) domain: *mut ibv_pd,
    /// The program's, for its functions.
    pub(super) context: *mut c_void,
}

// SAFETY: the program says by giving functions that they may be called by whatever thread makes objects.
unsafe impl Send for Allocator {}
// SAFETY: as above.
unsafe impl Sync for Allocator {}

impl Allocator {
    /// Asks for memory; `None` where the provider shall find it itself.
    fn give(&self, layout: Layout, resource: Resource) -> Option<*mut c_void> {
        let _guest = Guest::enter();
        // SAFETY: these are the arguments that the function expects.
        let at = unsafe {
            (self.alloc)(
                self.domain,
                self.context,
                layout.size(),
                layout.align(),
                resource as u64,
            )
        };
        (at != IBV_ALLOCATOR_USE_DEFAULT).then_some(at)
    }

    /// Gives memory back.
    ///
    /// # Safety
    /// It must have been given for this resource, and be used no more.
    unsafe fn take(&self, at: *mut c_void, resource: Resource) {
        let _guest = Guest::enter();
        // SAFETY: as the caller says.
        unsafe { (self.free)(self.domain, self.context, at, resource as u64) };
    }
}

/// Where memory came from: the allocator of a domain that is in use until the memory is given back, or the heap.
type Origin = Option<(Allocator, Resource, Use)>;

/// An object, and behind it where its memory came from.
#[repr(C)]
struct Housed<T> {
    object: T,
    from: Origin,
}

impl<T> Housed<T> {
    /// What is asked of an allocator: at least what every C allocator gives.
    const LAYOUT: Layout = match Layout::new::<Housed<T>>().align_to(16) {
        Ok(layout) => layout,
        Err(_) => panic!("an object of this provider is larger than memory"),
    };
}

/// Memory for an object that is to be made.
pub struct Place<T> {
    at: *mut Housed<T>,
    from: Origin,
}

impl<T> Place<T> {
    /// Finds a place for an object that is made in `domain`, if in any.
    ///
    /// The program's allocator may call verbs itself: no lock must be held.
    pub fn find(domain: Option<&Pd>, resource: Resource) -> Result<Place<T>, VerbsError> {
        let layout = Housed::<T>::LAYOUT;
        let given = domain.and_then(|domain| {
            let allocator = domain.allocator()?;
            let used = domain.enter();
            Some((allocator.give(layout, resource)?, (allocator, resource, used)))
        });
        let (at, from) = match given {
            Some((at, from)) => (at, Some(from)),
            // SAFETY: the layout is not of zero bytes.
            None => (unsafe { alloc(layout) }.cast(), None),
        };
        if at.is_null() {
            return Err(VerbsError::NoMemory);
        }
        let place = Place { at: at.cast(), from };
        if place.at.is_aligned() {
            Ok(place)
        } else {
            Err(VerbsError::Invalid)
        }
    }

    /// The address that the object will have.
    pub fn address(&self) -> u64 {
        self.at as u64
    }

    /// Puts the object there; [`remove`] takes it away.
    pub fn put(mut self, object: T) -> *mut T {
        let (at, from) = (self.at, self.from.take());
        std::mem::forget(self);
        // SAFETY: there is room, which nobody else has.
        unsafe { at.write(Housed { object, from }) };
        at.cast()
    }
}

impl<T> Drop for Place<T> {
    fn drop(&mut self) {
        // SAFETY: it came from there, and nobody uses it.
        unsafe { free(self.at, self.from.take()) };
    }
}

/// Ends an object, and gives its memory back.
///
/// # Safety
/// [`Place::put`] must have put it there, and nobody may use it any more.
pub unsafe fn remove<T>(object: *mut T) {
    let at = object.cast::<Housed<T>>();
    // SAFETY: as the caller says; the object comes first.
    unsafe {
        let from = (&raw const (*at).from).read();
        ptr::drop_in_place(&raw mut (*at).object);
        free(at, from);
    }
}

/// Frees memory.
///
/// # Safety
/// It must have come from there, and be used no more.
unsafe fn free<T>(at: *mut Housed<T>, from: Origin) {
    // SAFETY: as the caller says.
    unsafe {
        match from {
            Some((allocator, resource, _used)) => allocator.take(at.cast(), resource),
            None => dealloc(at.cast(), Housed::<T>::LAYOUT),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_on_the_heap_is_dropped_once() {
        let shared = std::sync::Arc::new(7);
        let place = Place::find(None, Resource::Cq).unwrap();
        let address = place.address();
        let object = place.put(shared.clone());
        assert_eq!(object as u64, address);
        assert_eq!(std::sync::Arc::strong_count(&shared), 2);
        // SAFETY: `put` gave it.
        unsafe { remove(object) };
        assert_eq!(std::sync::Arc::strong_count(&shared), 1);
        drop(Place::<[u64; 100]>::find(None, Resource::Qp).unwrap());
    }
}
