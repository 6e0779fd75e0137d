//! The actor's part in copies of cached prefixes.

use std::{collections::BTreeMap, convert::Infallible};

use baton_migration::{PREFIX_COPIES_MAX, Place, PrefixOutput, RequestName, SeatsInput, Tag, ToGateway};
use baton_units::Blocks;
use baton_wire::migration::{ControlFrame, MoveTo, PrefixCopied, Refusal, RunRequest};
use tokio::sync::oneshot;

use super::{Actor, PrefixEnd, short};
use crate::migration::{kv_target::Opening, prefix_source::PrefixSource, travel};

/// What is known of the copies of prefixes beside what the seats hold.
#[derive(Default)]
pub(super) struct Prefixes {
    /// Where the latest order goes, until it is carried out.
    ordered: Option<(MoveTo, RunRequest)>,
    /// Under way; dropped to end them.
    under_way: BTreeMap<RequestName, oneshot::Sender<Infallible>>,
    /// What the copy that ends now came to, or why to nothing.
    ended: Option<Result<PrefixCopied, String>>,
}

impl Actor {
    pub(super) fn copy_prefix(&mut self, request: RequestName, attempt: Tag, target: Place, to: &[u8], prefix: &[u8]) {
        let order = MoveTo::from_bytes(to).map_err(|error| error.to_string()).and_then(|to| Ok((to, RunRequest::from_bytes(prefix)?)));
        match order {
            Ok((to, mut run)) => {
                if self.models.served.contains(&run.model) {
                    run.model.clone_from(&self.models.engine);
                }
                self.prefixes.ordered = Some((to, run));
                self.feed(SeatsInput::CopyPrefix { request, attempt, target });
                self.prefixes.ordered = None;
            }
            Err(why) => {
                tracing::warn!(%request, why, "a prefix was to be copied by an order that cannot be read");
                self.tell_aborted(request, attempt, why);
            }
        }
    }

    /// Only what its gateway announced, some at a time.
    pub(super) fn accept_prefix(&mut self, opening: &Opening) -> Result<oneshot::Receiver<Infallible>, Refusal> {
        let Opening { request, attempt, .. } = *opening;
        self.check_announced(opening)?;
        // It is announced for one connection.
        self.expected.remove(&request);
        self.feed(SeatsInput::TakePrefix { request, attempt });
        if !self.seats.holds_prefix(request, attempt) {
            return Err(Refusal::Other(format!(
                "the copy is over, or {PREFIX_COPIES_MAX} prefixes are taken in, which is the most at a time"
            )));
        }
        let (sender, stopped) = oneshot::channel();
        self.prefixes.under_way.insert(request, sender);
        Ok(stopped)
    }

    pub(super) fn prefix_ended(&mut self, request: RequestName, attempt: Tag, PrefixEnd(end): PrefixEnd) {
        let blocks = end.as_ref().ok().map(|copied| Blocks(copied.blocks));
        self.prefixes.ended = Some(end);
        self.feed(SeatsInput::PrefixEnded { request, attempt, blocks });
        self.prefixes.ended = None;
    }

    pub(super) fn perform_prefix(&mut self, request: RequestName, attempt: Tag, output: &PrefixOutput) {
        match *output {
            PrefixOutput::Send { target } => self.send_prefix(request, attempt, target),
            PrefixOutput::Drop => drop(self.prefixes.under_way.remove(&request)),
            PrefixOutput::Copied { blocks } => {
                // What a repeated order is answered has no numbers any more.
                let told = self.prefixes.ended.take().and_then(Result::ok);
                let copied = told.unwrap_or(PrefixCopied { blocks: blocks.0, ..PrefixCopied::default() });
                self.send(request.gateway, ControlFrame::PrefixCopied { request, attempt, copied });
            }
            PrefixOutput::Aborted => {
                let why = self.prefixes.ended.take().and_then(Result::err);
                self.tell_aborted(request, attempt, why.unwrap_or_else(|| "it is over here, or too many are under way".to_owned()));
            }
        }
    }

    fn send_prefix(&mut self, request: RequestName, attempt: Tag, target: Place) {
        let Some((to, run)) = self.prefixes.ordered.take() else { return };
        let source = PrefixSource {
            identity: self.identity.clone(),
            engine: self.engine.clone(),
            inputs: self.inputs.clone(),
            request,
            attempt,
            here: self.seats.place(),
            target,
            to,
            prefix: travel::prefix_of(&run),
        };
        let (sender, stopped) = oneshot::channel();
        self.prefixes.under_way.insert(request, sender);
        tokio::spawn(source.run(stopped));
    }

    /// A copy has no epoch.
    fn tell_aborted(&mut self, request: RequestName, attempt: Tag, why: String) {
        let message = ToGateway::Aborted { epoch: Tag(0), attempt };
        self.send(request.gateway, ControlFrame::ToGateway { request, message, why: short(why) });
    }
}
