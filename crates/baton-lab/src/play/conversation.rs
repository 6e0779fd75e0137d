use baton_sim::ClientRequest;
use serde::Serialize;

const BYTES_PER_TOKEN: usize = 4;
/// Bytes of `ChatML` around a system message, around a user's with the opening of the answer after it, and around a later user's one,
/// where the answer before it ends first.
const SYSTEM_FRAME: usize = "<|im_start|>system\n<|im_end|>\n".len();
const QUESTION_FRAME: usize = "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n".len();
const NEXT_FRAME: usize = "<|im_end|>\n".len() + QUESTION_FRAME;

#[derive(Debug, Clone, Serialize)]
pub(super) struct Message {
    role: &'static str,
    content: String,
}

/// A chat whose prompts have as many tokens of four bytes as the workload says, and share as many with others.
#[derive(Debug, Default)]
pub(super) struct Conversation {
    messages: Vec<Message>,
    /// Tokens of prompts and answers up to here.
    tokens: usize,
}

impl Conversation {
    pub(super) fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// With the request's own text at its end: what its prompt has beyond the tokens that are here already.
    pub(super) fn asked(mut self, request: &ClientRequest) -> Self {
        let mut frame = NEXT_FRAME;
        if self.messages.is_empty() {
            frame = QUESTION_FRAME;
            if request.shared > 0 {
                self.say("system", &request.prompt[..request.shared], SYSTEM_FRAME);
                self.tokens = request.shared;
            }
        }
        self.say("user", &request.prompt[self.tokens..], frame);
        self.tokens = request.prompt.len();
        self
    }

    pub(super) fn answered(mut self, text: String) -> Self {
        self.tokens += text.len() / BYTES_PER_TOKEN;
        self.messages.push(Message { role: "assistant", content: text });
        self
    }

    fn say(&mut self, role: &'static str, tokens: &[u32], frame: usize) {
        let mut content: String = tokens.iter().flat_map(|token| letters(*token)).collect();
        content.truncate(content.len().saturating_sub(frame));
        self.messages.push(Message { role, content });
    }
}

/// Four letters for a token: other letters for another token, but for those that agree in 20 bits.
fn letters(token: u32) -> [char; BYTES_PER_TOKEN] {
    std::array::from_fn(|place| char::from(b'A' + (token >> (5 * place)) as u8 % 32 % 26))
}

/// Tokens of an answer.
pub(super) fn tokens(text: &str) -> Vec<u32> {
    let token = |bytes: &[u8]| bytes.iter().rev().fold(0, |token, byte| token << 8 | u32::from(*byte));
    text.as_bytes().chunks(BYTES_PER_TOKEN).map(token).collect()
}

#[cfg(test)]
mod tests {
    use baton_sim::{Shape, Workload, WorkloadName};
    use baton_text::Tokenizer;
    use baton_units::Time;
    use serde_json::{Map, json};

    use super::*;

    fn rendered(conversation: &Conversation) -> Vec<u32> {
        let tokenizer = Tokenizer::bytes4();
        let text = tokenizer.render_chat(&json!(conversation.messages()), None, true, &Map::new()).unwrap();
        tokenizer.encode(&text, false)
    }

    #[test]
    fn prompts_have_the_tokens_that_the_simulator_counts() {
        for name in WorkloadName::ALL {
            let mut workload = Workload::new(name, Shape { requests: 40, ..Shape::lab(name, 2) }, 3);
            for request in workload.first() {
                let conversation = Conversation::default().asked(&request);
                assert_eq!(rendered(&conversation).len(), request.prompt.len(), "{name}");
            }
        }
    }

    #[test]
    fn a_next_step_begins_with_the_whole_step_before_and_its_answer() {
        let mut workload = Workload::new(WorkloadName::Agent, Shape::lab(WorkloadName::Agent, 1), 3);
        let first = workload.first().remove(0);
        let conversation = Conversation::default().asked(&first);
        let answer = "some words of ".repeat(20)[..256].to_owned();
        let before = [rendered(&conversation), tokens(&answer)].concat();
        let next = workload.after(&first, Some(&tokens(&answer)), Time::ZERO).unwrap();
        let after = rendered(&conversation.answered(answer).asked(&next));
        assert_eq!(after.len(), next.prompt.len());
        assert_eq!(after[..before.len()], before);
    }
}
