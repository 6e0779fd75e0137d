//! Cached prefixes that are copied from engine to engine, without a sequence.

use std::sync::Arc;

use baton_kv::{BlockKey, CacheDomain, OutOfBlocks};
use baton_units::{Blocks, Tokens};

use super::{Engine, target::Preparation};
use crate::{MoveRefusal, Prefix, PreparedId, SubmitError};

impl Engine {
    /// Takes references on the leading full blocks of `prefix` that are cached here, compared token by token, and allocates more up to
    /// `blocks`, as far as the prefix has full ones: with none to allocate it keeps what is here from eviction while it is read. They
    /// are [installed](Self::install) or [abandoned](Self::abandon) in the end; nobody is preempted for them.
    ///
    /// # Panics
    /// While a step is in flight.
    pub fn hold_prefix(&mut self, prefix: &Prefix, blocks: Blocks) -> Result<PreparedId, MoveRefusal> {
        self.assert_between_steps();
        if prefix.model != self.config.model {
            let (source_model, target_model) = (prefix.model.clone(), self.config.model.clone());
            return Err(MoveRefusal::Model { source_model, target_model });
        }
        let vocabulary = self.config.vocabulary;
        if let Some(&token) = prefix.tokens.iter().find(|&&token| token >= vocabulary) {
            return Err(SubmitError::OutOfVocabulary { token, size: vocabulary }.into());
        }
        let size = self.config.block_size;
        let full = Tokens(prefix.tokens.len() as u32).full_blocks(size);
        let (domain, tokens) = (self.domain_of_prefix(prefix), prefix.tokens[..full.to_tokens(size).0 as usize].to_vec());
        let found = self.pool.find_prefix(&domain, &domain.keys(&tokens, size), &tokens, full);
        let (held, room) = (found.len(), found.len().max(blocks.min(full)));
        // Who runs keeps the reserve that it was admitted with.
        let reserve = if room == held || self.running.is_empty() { Blocks::ZERO } else { self.config.watermark_blocks() };
        let (needed, available) = (room - held + found.reclaimable + reserve, self.pool.available());
        if needed > available {
            return Err(OutOfBlocks { needed, available }.into());
        }
        let mut table = self.pool.take_prefix(found);
        let missing = held.to_tokens(size).0..room.to_tokens(size).0;
        self.pool.reserve(&mut table, missing, &mut Vec::new()).expect("the needed blocks were counted");
        self.next_prepared += 1;
        let id = PreparedId(self.next_prepared);
        self.prepared.insert(id, Preparation { request: None, held, tokens, table });
        Ok(id)
    }

    /// Names of the prefix's full blocks, in order.
    pub fn keys_of(&self, prefix: &Prefix) -> Vec<BlockKey> {
        self.domain_of_prefix(prefix).keys(&prefix.tokens, self.config.block_size)
    }

    fn domain_of_prefix(&self, Prefix { adapter, salt, public, .. }: &Prefix) -> Arc<CacheDomain> {
        self.domain_of(adapter.as_deref(), salt.as_deref(), *public)
    }

    /// Caches the blocks of a held prefix, whose KV has been written, and lets go of them: they are found, told of and evicted as if they
    /// had been computed here. Tells how many blocks of the prefix are cached now: fewer where a key collides, none after a reset.
    ///
    /// # Panics
    /// While a step is in flight.
    pub fn install(&mut self, id: PreparedId) -> Result<Blocks, MoveRefusal> {
        self.assert_between_steps();
        let is_prefix = self.prepared.get(&id).is_some_and(|preparation| preparation.request.is_none());
        let preparation = if is_prefix { self.prepared.remove(&id) } else { None };
        let Preparation { tokens, mut table, .. } = preparation.ok_or(MoveRefusal::NotPrepared(id))?;
        let size = self.config.block_size;
        let tokens = &tokens[..Blocks(table.blocks().len() as u32).to_tokens(size).0 as usize];
        let keys = table.domain().keys(tokens, size);
        self.pool.commit(&mut table, &keys, tokens);
        let cached = table.blocks().iter().take_while(|block| self.pool.is_cached(**block)).count();
        self.pool.release(table);
        Ok(Blocks(cached as u32))
    }
}
