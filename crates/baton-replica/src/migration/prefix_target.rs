//! Takes in a cached prefix that another replica brings.

use std::convert::Infallible;

use baton_engine::Prefix;
use baton_link::{ConnectionError, FrameReader, FrameWriter, Identity};
use baton_units::{Blocks, Tokens};
use baton_wire::migration::{KvFrame, KvPlan, PrefixCopied, Refusal, RunRequest};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
};

use super::{
    actor::{Input, PrefixEnd},
    kv_target::{Arrival, Came, Landing, Opening, TakeError, block_bytes, read, refusal, refuse, written},
    travel,
};
use crate::driver::{EngineHandle, HeldPrefix, MoveCommand, Written};

/// One prefix that comes.
pub(super) struct PrefixTarget<'a> {
    pub(super) identity: &'a Identity,
    pub(super) engine: EngineHandle,
    pub(super) inputs: mpsc::Sender<Input>,
    pub(super) opening: Opening,
    pub(super) writer: FrameWriter,
}

impl PrefixTarget<'_> {
    pub(super) async fn serve(mut self, reader: FrameReader, plan: KvPlan) -> Result<(), TakeError> {
        let began = self.engine.now();
        let (sender, answer) = oneshot::channel();
        let _ = self.inputs.send(Input::PrefixOpened { opening: self.opening, answer: sender }).await;
        let stopped = match answer.await.map_err(|_| TakeError::Gone)? {
            Ok(stopped) => stopped,
            Err(refusal) => return refuse(&mut self.writer, refusal).await,
        };
        let ended = self.take(reader, &plan, stopped).await;
        let took_us = travel::micros(self.engine.real(self.engine.now().since(began)));
        let end = match &ended {
            Ok(copied) => Ok(PrefixCopied { took_us, ..*copied }),
            Err(why) => Err(why.to_string()),
        };
        let Opening { request, attempt, .. } = self.opening;
        let _ = self.inputs.send(Input::Prefix { request, attempt, news: PrefixEnd(end) }).await;
        match ended {
            Ok(PrefixCopied { blocks, .. }) => Ok(self.writer.kv(&KvFrame::Installed { blocks }).await?),
            Err(TakeError::Refused(refusal)) => refuse(&mut self.writer, refusal).await,
            Err(TakeError::Protocol(why)) => {
                // So that the holder can say why.
                let _ = self.writer.kv(&KvFrame::Abort { why: why.clone() }).await;
                Err(TakeError::Protocol(why))
            }
            Err(why) => Err(why),
        }
    }

    /// Until all of it is cached, or `stopped`, whose other end is dropped.
    async fn take(
        &mut self,
        reader: FrameReader,
        plan: &KvPlan,
        stopped: oneshot::Receiver<Infallible>,
    ) -> Result<PrefixCopied, TakeError> {
        let mut held = self.hold(plan).await?;
        let id = held.room.id;
        // Nothing lies between here and the end of what is held that could be dropped.
        let taken = tokio::select! {
            taken = self.take_blocks(reader, plan.blocks, &mut held) => taken,
            _ = stopped => Err(TakeError::Aborted("it is not wanted any more".to_owned())),
        };
        // What was installed is not held any more.
        let _ = self.engine.move_sequence(MoveCommand::Abandon(id));
        taken
    }

    async fn hold(&self, plan: &KvPlan) -> Result<HeldPrefix, TakeError> {
        let prefix = self.planned(plan)?;
        let (sender, answer) = oneshot::channel();
        self.order(MoveCommand::HoldPrefix(Box::new(prefix), Blocks(plan.blocks), sender))?;
        answer.await.map_err(|_| TakeError::Gone)?.map_err(|why| TakeError::Refused(refusal(&why)))
    }

    fn planned(&self, plan: &KvPlan) -> Result<Prefix, TakeError> {
        let run = RunRequest::from_bytes(&plan.request).map_err(|why| TakeError::Refused(Refusal::Other(why)))?;
        let size = travel::block_size(&self.identity.hello);
        let (tokens, whole) = (plan.tokens.len() as u64, u64::from(plan.blocks) * u64::from(size.get()));
        if plan.blocks == 0 || tokens != whole {
            return Err(TakeError::Protocol(format!("{} blocks of a prefix have {whole} tokens, and {tokens} came", plan.blocks)));
        }
        Ok(Prefix { tokens: plan.tokens.clone(), ..travel::prefix_of(&run) })
    }

    async fn take_blocks(&mut self, reader: FrameReader, blocks: u32, held: &mut HeldPrefix) -> Result<PrefixCopied, TakeError> {
        let block_bytes = block_bytes(self.identity);
        let mut arrival = Arrival::new(held.room, block_bytes);
        let landing = Landing::new(block_bytes, std::mem::take(&mut held.spares));
        self.writer.kv(&arrival.have()).await?;
        let (sender, mut frames) = mpsc::channel(16);
        let mut tasks = JoinSet::new();
        tasks.spawn(read(reader, landing.clone(), sender));
        let (mut all_sent, mut bytes_taken) = (false, 0);
        loop {
            arrival.write(&self.engine, all_sent)?;
            if all_sent && arrival.writing.is_empty() {
                break;
            }
            tokio::select! {
                frame = frames.recv(), if !all_sent => {
                    let ended = || ConnectionError::Io(std::io::ErrorKind::UnexpectedEof.into());
                    let frame = match frame.ok_or_else(ended)?? {
                        Came::Block { index, tokens, bytes } => {
                            arrival.block(index, tokens, bytes)?;
                            continue;
                        }
                        Came::Other(frame) => frame,
                    };
                    if let KvFrame::Abort { why } = frame {
                        return Err(TakeError::Aborted(why));
                    } else if matches!(frame, KvFrame::PrefixSent) {
                        all_sent = true;
                    } else {
                        return Err(TakeError::Protocol("the source sent what does not belong to a prefix".to_owned()));
                    }
                }
                written = written(&mut arrival.writing) => {
                    let (Written { spares, room }, bytes) = written.map_err(TakeError::Refused)?;
                    landing.give_back(spares);
                    bytes_taken += bytes;
                    self.writer.kv(&arrival.taken(room, bytes)).await?;
                }
            }
        }
        let size = Tokens(travel::block_size(&self.identity.hello).get());
        let is_there = |index: &u32| arrival.tokens.get(index).is_some_and(|&tokens| tokens == size.0);
        if let Some(missing) = (held.room.held.0..blocks).find(|index| !is_there(index)) {
            return Err(TakeError::Protocol(format!("block {missing} of {blocks} did not come whole")));
        }
        let (sender, answer) = oneshot::channel();
        self.order(MoveCommand::InstallPrefix(held.room.id, sender))?;
        let installed = answer.await.map_err(|_| TakeError::Gone)?.map_err(|why| TakeError::Refused(refusal(&why)))?;
        Ok(PrefixCopied { blocks: installed.0, held: held.room.held.0, bytes: bytes_taken, took_us: 0 })
    }

    fn order(&self, command: MoveCommand) -> Result<(), TakeError> {
        self.engine.move_sequence(command).map_err(|_| TakeError::Gone)
    }
}
