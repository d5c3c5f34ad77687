//! An opened device (`ibv_context`).

use std::ffi::{c_int, c_void};
use std::os::fd::RawFd;
use std::ptr;
use std::sync::{Arc, OnceLock};

use ferroce_engine::control::{DeviceInfo, GID_TABLE_LEN};
use ferroce_engine::link::RoceVersion;
use ferroce_engine::runtime::{Engine, Guest, SubscriptionId};

use super::event_pipe::EventPipe;
use super::events::Objects;
use super::ops;
use crate::abi::library::{Library, RELEASE_VARIABLE};
use crate::abi::private::{AsyncRecord, CompletionRecord};
use crate::abi::verbs::{ibv_context, ibv_device, ibv_gid_entry};
use crate::abi::version::Abi;
use crate::guard::guard;
use crate::hooks::command::{CommandDescriptor, Commands};
use crate::hooks::{descriptors, set_errno};
use crate::report::say;

/// The number of the only port.
pub const PORT: u32 = 1;
/// `enum ibv_gid_type`.
fn gid_type(version: RoceVersion) -> u32 {
    match version {
        RoceVersion::V1 => 1,
        RoceVersion::V2 => 2,
    }
}

/// Where asynchronous events go.
pub type AsyncPipe = EventPipe<{ size_of::<AsyncRecord>() / 8 }>;
/// A completion channel.
pub type Channel = EventPipe<{ size_of::<CompletionRecord>() / 8 }>;

/// An opened device, beside what libibverbs holds of it.
pub struct Context {
    /// The engine of the device in this process.
    pub engine: Arc<Engine>,
    /// The interface of the libibverbs that opened it.
    pub abi: Abi,
    /// Where asynchronous events go.
    pub events: Arc<AsyncPipe>,
    /// Which object an event concerns.
    pub objects: Objects,
    library: &'static Library,
    subscription: OnceLock<SubscriptionId>,
}

impl Context {
    /// Opens a device, as the op `alloc_context` does: gives the `verbs_context`, or null with `errno` set.
    ///
    /// # Safety
    /// The device must be one of that libibverbs, and `cmd_fd` its descriptor, which this function takes over.
    pub unsafe fn open(
        library: &'static Library,
        device: *mut ibv_device,
        name: &str,
        cmd_fd: c_int,
    ) -> *mut c_void {
        let engine = Engine::open(name).map_err(|error| (error.errno(), error.to_string()));
        let parts = engine.and_then(|engine| {
            let pipe = AsyncPipe::new()
                .map_err(|error| (error.raw_os_error().unwrap_or(libc::EIO), error.to_string()));
            pipe.map(|(events, async_fd)| (engine, events, async_fd))
        });
        let (engine, events, async_fd) = match parts {
            Ok(parts) => parts,
            Err((errno, error)) => {
                say(format_args!("{name} can't be opened: {error}"));
                // SAFETY: the descriptor is ours to close.
                unsafe { libc::close(cmd_fd) };
                set_errno(errno);
                return ptr::null_mut();
            }
        };
        let abi = library.abi;
        // Behind libibverbs' structure lies the address of ours.
        let size = abi.verbs_context + size_of::<*const Context>();
        // SAFETY: the arguments are those of the op, the `verbs_context` comes first, and there is no driver id.
        let verbs_context =
            unsafe { (library.init_and_alloc_context)(device, cmd_fd, size, ptr::null_mut(), 0) };
        if verbs_context.is_null() {
            // SAFETY: the descriptor was made for libibverbs, which has not got it.
            unsafe { libc::close(async_fd) };
            return ptr::null_mut();
        }
        // SAFETY: the place lies within the structure, and there libibverbs states its size.
        let size = unsafe { verbs_context.byte_add(abi.sz()).cast::<usize>().read() };
        if size != abi.verbs_context {
            say(format_args!(
                "{name} can't be opened: this libibverbs is not the rdma-core {} that it is taken for: set {RELEASE_VARIABLE} to its release",
                abi.release
            ));
            // SAFETY: libibverbs made the structure with calloc and closes its own descriptor; the other one is ours.
            unsafe {
                (library.uninit_context)(verbs_context);
                libc::free(verbs_context);
                libc::close(async_fd);
            }
            set_errno(libc::ENOTSUP);
            return ptr::null_mut();
        }
        let context = Arc::new(Context {
            engine,
            abi,
            events: Arc::new(events),
            objects: Objects::default(),
            library,
            subscription: OnceLock::new(),
        });
        let weak = Arc::downgrade(&context);
        let subscriber = move |event: &_| {
            if let Some(context) = weak.upgrade() {
                context.publish(event);
            }
        };
        _ = context
            .subscription
            .set(context.engine.subscribe(Box::new(subscriber)));
        descriptors::insert(async_fd, context.events.clone());
        descriptors::insert(cmd_fd, Arc::new(CommandDescriptor(Arc::downgrade(&context))));

        tracing::debug!("{name} is open, with slot {}", context.engine.slot());
        let vectors = std::thread::available_parallelism().map_or(1, usize::from);
        let ops = ops::table(&abi);
        // SAFETY: the structure was just made with this layout, and nobody else has it yet.
        unsafe {
            let public = verbs_context.byte_add(abi.ibv_context()).cast::<ibv_context>();
            (*public).async_fd = async_fd;
            (*public).num_comp_vectors = vectors as c_int;
            *Context::place(public) = Arc::into_raw(context);
            (library.set_ops)(verbs_context, ops.as_ptr());
        }
        verbs_context
    }

    /// Where our context stands behind libibverbs' one.
    fn place(context: *mut ibv_context) -> *mut *const Context {
        context.cast::<u8>().wrapping_add(Abi::IBV_CONTEXT).cast()
    }

    /// The context behind a public one.
    ///
    /// # Safety
    /// `context` must be open, and of this provider.
    pub unsafe fn of(context: *mut ibv_context) -> Arc<Context> {
        // SAFETY: `open` put it there, and `free_context` has not taken it yet.
        unsafe {
            let context = *Context::place(context);
            Arc::increment_strong_count(context);
            Arc::from_raw(context)
        }
    }

    /// The device as it is now.
    pub fn info(&self) -> Arc<DeviceInfo> {
        self.engine.info()
    }
}

impl Commands for Context {
    fn create_channel(&self) -> Result<RawFd, c_int> {
        if !self.engine.usable() || self.engine.is_gone() {
            return Err(libc::EIO);
        }
        let (channel, fd) = Channel::new().map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
        descriptors::insert(fd, Arc::new(channel));
        Ok(fd)
    }

    fn gids(&self) -> Vec<ibv_gid_entry> {
        let info = self.info();
        let used = info
            .gids
            .iter()
            .enumerate()
            .filter_map(|(index, entry)| Some((index, entry.as_ref()?)));
        used.map(|(index, entry)| ibv_gid_entry {
            gid: entry.gid,
            gid_index: index as u32,
            port_num: PORT,
            gid_type: gid_type(entry.version),
            ndev_ifindex: info.ifindex,
        })
        .collect()
    }

    fn gid_table_len(&self) -> u32 {
        GID_TABLE_LEN as u32
    }
}

/// Closes the device. Objects that the program has not destroyed keep the engine until the process ends.
pub(super) unsafe extern "C" fn free_context(context: *mut ibv_context) {
    guard((), || {
        let _guest = Guest::enter();
        // SAFETY: `open` put it there, and the program closes a context once.
        let ours = unsafe { Arc::from_raw(*Context::place(context)) };
        if let Some(subscription) = ours.subscription.get() {
            ours.engine.unsubscribe(*subscription);
        }
        let library = ours.library;
        drop(ours);
        let verbs_context = context.wrapping_byte_sub(library.abi.ibv_context());
        // SAFETY: libibverbs made the structure with calloc; its descriptors are closed by it.
        unsafe {
            (library.uninit_context)(verbs_context.cast());
            libc::free(verbs_context.cast());
        }
    });
}
