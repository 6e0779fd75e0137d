//! Takes a cached prefix to another replica, without a request and beside whatever runs.

use std::{convert::Infallible, sync::Arc};

use baton_engine::{MoveRefusal, Prefix};
use baton_link::Identity;
use baton_migration::{Place, RequestName, Tag};
use baton_units::Blocks;
use baton_wire::migration::{HeldBlocks, KvFrame, KvPlan, MoveTo, PrefixCopied};
use tokio::sync::{mpsc, oneshot};

use super::{
    actor::{Input, PrefixEnd},
    fault::{self, Point},
    kv_source::{CopyError, Link},
    travel,
};
use crate::driver::{EngineHandle, HeldPrefix, MoveCommand};

/// One copy of one prefix.
pub(super) struct PrefixSource {
    pub(super) identity: Arc<Identity>,
    pub(super) engine: EngineHandle,
    pub(super) inputs: mpsc::Sender<Input>,
    pub(super) request: RequestName,
    pub(super) attempt: Tag,
    pub(super) here: Place,
    pub(super) target: Place,
    pub(super) to: MoveTo,
    pub(super) prefix: Prefix,
}

#[derive(Debug, thiserror::Error)]
enum BringError {
    #[error("nothing of it is cached here")]
    NotCached,
    #[error(transparent)]
    NotHeld(#[from] MoveRefusal),
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error("the engine is gone")]
    Gone,
}

impl From<std::io::Error> for BringError {
    fn from(error: std::io::Error) -> Self {
        Self::Copy(error.into())
    }
}

impl PrefixSource {
    /// Until it is there, or `stopped`, whose other end is dropped.
    pub(super) async fn run(mut self, stopped: oneshot::Receiver<Infallible>) {
        let began = self.engine.now();
        let ended = match self.hold().await {
            // Nothing lies between here and the end of what is held that could be dropped.
            Ok(held) => {
                let id = held.room.id;
                let ended = tokio::select! {
                    ended = self.bring(held) => ended,
                    _ = stopped => Err(BringError::Copy(CopyError::Ended)),
                };
                let _ = self.engine.move_sequence(MoveCommand::Abandon(id));
                ended
            }
            Err(why) => Err(why),
        };
        let took_us = travel::micros(self.engine.real(self.engine.now().since(began)));
        let end = ended.map(|copied| PrefixCopied { took_us, ..copied }).map_err(|why| why.to_string());
        if let Err(why) = &end {
            tracing::info!(copy = %self.request, target = %self.target, why, "a prefix is not copied");
        }
        let (request, attempt) = (self.request, self.attempt);
        let _ = self.inputs.send(Input::Prefix { request, attempt, news: PrefixEnd(end) }).await;
    }

    async fn hold(&self) -> Result<HeldPrefix, BringError> {
        let (sender, answer) = oneshot::channel();
        self.order(MoveCommand::HoldPrefix(Box::new(self.prefix.clone()), Blocks::ZERO, sender))?;
        Ok(answer.await.map_err(|_| BringError::Gone)??)
    }

    async fn bring(&mut self, HeldPrefix { room, mut keys, .. }: HeldPrefix) -> Result<PrefixCopied, BringError> {
        let (size, blocks) = (travel::block_size(&self.identity.hello), room.held);
        if blocks == Blocks::ZERO {
            return Err(BringError::NotCached);
        }
        let mut link = Link::connect(&self.identity, self.target, &self.to).await?;
        let PrefixSource { request, attempt, here: source, target, .. } = *self;
        link.writer.kv(&KvFrame::Open { request, attempt, source, target, nonce: self.to.nonce }).await?;
        keys.truncate(blocks.0 as usize);
        let mut tokens = std::mem::take(&mut self.prefix.tokens);
        tokens.truncate(blocks.to_tokens(size).0 as usize);
        let plan = KvPlan { tokens, keys, blocks: blocks.0, request: travel::prefix_to_wire(&self.prefix).to_bytes() };
        link.writer.kv(&KvFrame::Prefix(plan)).await?;
        let answer = link.receive().await?;
        let KvFrame::Have { blocks: HeldBlocks { held }, credit } = answer else { return Err(CopyError::unexpected(answer).into()) };
        link.credit = credit;
        let mut next = held;
        while next < blocks.0 {
            let (sender, answer) = oneshot::channel();
            self.order(MoveCommand::ReadPrefix(room.id, next..blocks.0, sender))?;
            let read = answer.await.ok().flatten().filter(|read| !read.is_empty()).ok_or(BringError::Gone)?;
            let end = next + read.len() as u32;
            while next < end {
                // Those of a prefix are full.
                let left = &read[read.len() - (end - next) as usize..];
                next += link.send(next, blocks.to_tokens(size), size, left).await? as u32;
                fault::reached(Point::PrefixCopying);
            }
        }
        link.writer.kv(&KvFrame::PrefixSent).await?;
        loop {
            let frame = link.receive().await?;
            if let KvFrame::Installed { blocks } = frame {
                return Ok(PrefixCopied { blocks, held, bytes: link.sent, took_us: 0 });
            }
            if !matches!(frame, KvFrame::Credit { .. }) {
                return Err(CopyError::unexpected(frame).into());
            }
        }
    }

    fn order(&self, command: MoveCommand) -> Result<(), BringError> {
        self.engine.move_sequence(command).map_err(|_| BringError::Gone)
    }
}
