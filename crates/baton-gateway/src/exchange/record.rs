use crate::{chunk::Chunk, intake::Api, json::RawObject, plain::Plain};

/// What a client has of a stream that is passed on as it comes, kept so that another engine can go on with it. It costs a copy of what
/// comes, and is read only when the stream has lost its engine.
#[derive(Debug, Default)]
pub(super) struct Record {
    ids: Vec<u32>,
    /// Insides of JSON strings, one after the other.
    text: Vec<u8>,
    model: Option<String>,
    /// Something came that these do not tell, or the stream's end.
    is_over: bool,
}

impl Record {
    pub(super) fn plain(&mut self, plain: &Plain<'_>) {
        let before = self.ids.len();
        self.ids.extend(plain.token_ids());
        // Text without ids comes from an engine that tells none.
        self.is_over |= self.ids.len() == before;
        self.push_text(plain.text());
    }

    pub(super) fn chunk(&mut self, api: Api, chunk: &Chunk<'_>) {
        if self.model.is_none() {
            self.model = chunk.object.read("model").ok().flatten();
        }
        for (choice, piece) in chunk.choices.iter().zip(&chunk.pieces) {
            self.ids.extend_from_slice(&piece.token_ids);
            self.is_over |= piece.finish.is_some() || piece.count as usize != piece.token_ids.len();
            match api {
                Api::Completions => self.push_field(choice, "text"),
                Api::Chat => match choice.read::<RawObject<'_>>("delta") {
                    Ok(Some(delta)) => {
                        let other = ["reasoning", "reasoning_content", "refusal"].into_iter().any(|field| delta.given(field).is_some());
                        self.is_over |= other || delta.given("tool_calls").is_some_and(|calls| calls.get() != "[]");
                        self.push_field(&delta, "content");
                    }
                    Ok(None) => {}
                    Err(_) => self.is_over = true,
                },
            }
        }
    }

    /// Tokens and text, and the model as the engine named it; `None` where that is not all that the client has, or the stream was over.
    pub(super) fn told(&self) -> Option<(&[u32], String, Option<&str>)> {
        let text = [b"\"", &self.text[..], b"\""].concat();
        let text = serde_json::from_slice(&text).ok()?;
        (!self.is_over && !self.ids.is_empty()).then_some((&self.ids, text, self.model.as_deref()))
    }

    fn push_field(&mut self, object: &RawObject<'_>, field: &str) {
        if let Some(text) = object.given(field) {
            self.push_text(text.get().as_bytes());
        }
    }

    /// A JSON string, with its quotes.
    fn push_text(&mut self, quoted: &[u8]) {
        match quoted {
            [b'"', inside @ .., b'"'] => self.text.extend_from_slice(inside),
            _ => self.is_over = true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::Reading;

    fn recorded(api: Api, data: &[&str]) -> Record {
        let mut record = Record::default();
        for data in data {
            match Plain::read(api, data.as_bytes()) {
                Some(plain) => record.plain(&plain),
                None => match Reading::of(api, data.as_bytes()).unwrap() {
                    Reading::Chunk(chunk) => record.chunk(api, &chunk),
                    Reading::Error(error) => panic!("{error:?}"),
                },
            }
        }
        record
    }

    const OPENING: &str =
        r#"{"id":"a","model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#;
    const FIRST: &str = r#"{"id":"a","created":5,"choices":[{"index":0,"delta":{"content":"\"The\n"},"token_ids":[504,7]}]}"#;

    #[test]
    fn tokens_and_text_are_kept_as_they_came() {
        let with_usage = r#"{"id":"a","choices":[{"index":0,"delta":{"content":"é"},"token_ids":[9]}],"usage":{"prompt_tokens":1,"total_tokens":2,"completion_tokens":1}}"#;
        let record = recorded(Api::Chat, &[OPENING, FIRST, with_usage]);
        assert_eq!(record.told(), Some((&[504, 7, 9][..], "\"The\né".to_owned(), Some("m"))));
        let record = recorded(Api::Completions, &[r#"{"id":"a","choices":[{"index":0,"text":"x","token_ids":[1]}]}"#]);
        assert_eq!(record.told(), Some((&[1][..], "x".to_owned(), None)));
    }

    #[test]
    fn what_ids_do_not_tell_is_not_gone_on_with() {
        for other in [
            r#"{"id":"a","choices":[{"index":0,"delta":{"content":"no ids"}}]}"#,
            r#"{"id":"a","choices":[{"index":0,"delta":{"reasoning":"hm"},"token_ids":[1]}]}"#,
            r#"{"id":"a","choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]},"token_ids":[1]}]}"#,
            r#"{"id":"a","choices":[{"index":0,"delta":{"content":"."},"finish_reason":"stop","token_ids":[1]}]}"#,
        ] {
            assert_eq!(recorded(Api::Chat, &[OPENING, FIRST, other]).told(), None, "{other}");
        }
        assert_eq!(recorded(Api::Chat, &[OPENING]).told(), None, "nothing came yet");
    }
}
