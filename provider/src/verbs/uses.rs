//! Which objects others were made from: those must not end first.

use std::sync::Arc;

use ferroce_engine::verbs::VerbsError;

/// Counts the uses of an object.
#[derive(Default)]
pub struct Uses(Arc<()>);

/// A use; it ends when this is dropped.
pub struct Use {
    _counted: Arc<()>,
}

impl Uses {
    /// Begins a use.
    pub fn begin(&self) -> Use {
        Use {
            _counted: self.0.clone(),
        }
    }

    /// EBUSY while there are uses.
    pub fn none(&self) -> Result<(), VerbsError> {
        if Arc::strong_count(&self.0) == 1 {
            Ok(())
        } else {
            Err(VerbsError::Busy)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_until_the_last_use_ends() {
        let uses = Uses::default();
        assert_eq!(uses.none(), Ok(()));
        let (one, two) = (uses.begin(), uses.begin());
        drop(one);
        assert_eq!(uses.none(), Err(VerbsError::Busy));
        drop(two);
        assert_eq!(uses.none(), Ok(()));
    }
}
