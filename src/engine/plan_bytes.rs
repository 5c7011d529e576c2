//! The upper bound of the bytes of a plan.

use crate::EngineConfig;

impl EngineConfig {
    /// Upper bound of the bytes of the guesses in an output.
    pub fn max_guess_bytes(&self) -> usize {
        if self.guesses_on_device { self.max_rows * (2 * 5 + 5 * self.max_drafts) } else { 0 }
    }

    /// Upper bound of a plan's bytes on the wire for any requests. The rings are sized by it.
    pub fn max_plan_bytes(&self) -> usize {
        // Postcard writes a `u32` into at most 5 bytes, a `u64` into 10, an `f32` into 4 and a `bool` into 1.
        const NUMBERS: usize = 10 + 15 * 5 + 1 + 4; // step, lengths of the lists, whether the drafter runs, checksum
        const LEFT: usize = 5;
        const JOINED: usize = 5 * 5 + 2 + 10 + (8 * 4 + 6 * 5 + 10 + 3 * 5 + 10); // its numbers, sampling
        const TABLE: usize = 3 * 5; // its numbers, a partial block
        const GROWN: usize = 3 * 5;
        const COPIED: usize = 4 * 5;
        const WORK: usize = 4 * 5 + 1;
        // A row may receive what its last step settled: its own token and the drafts.
        let revised = 4 * 5 + 5 * (1 + self.max_drafts);
        let (drafts, grown) = match self.max_drafts {
            0 => (0, GROWN),
            n => (2 * 5 + 5 * n, GROWN * (1 + self.max_positions_ahead().div_ceil(self.block_size))),
        };
        let tables = self.num_groups() * (TABLE + COPIED + grown);
        // A row may leave, take a snapshot and start from one in the same plan; and it may be restored and saved.
        const STATES: usize = 5 + 2 * 2 * 5 + 3 * 5 + 3 * 5;
        let states = if self.num_states > 0 { STATES } else { 0 };
        let row = LEFT + JOINED + revised + tables + drafts + states + WORK;
        let num_joined_tokens = self.max_joined_tokens + self.max_sequence_len;
        let num_joined_blocks = num_joined_tokens.div_ceil(self.block_size);
        // With windows, rows also grow by the blocks of a chunk when they join.
        let num_chunk_blocks = match self.num_groups() - self.num_full_groups() {
            0 => 0,
            num_windows => num_windows * self.max_step_tokens.div_ceil(self.block_size),
        };
        let num_table_blocks = self.num_groups() * num_joined_blocks;
        // A joining row names its slot, and may fill it.
        const ADAPTER: usize = 5 + 5 + 10;
        let row = row + if self.max_adapters > 0 { ADAPTER } else { 0 };
        let copies =
            if self.num_host_blocks > 0 { self.max_host_copy_bytes(num_table_blocks, num_chunk_blocks) } else { 0 };
        let plan = NUMBERS + self.max_rows * row + 5 * (num_joined_tokens + num_table_blocks);
        plan + GROWN * num_chunk_blocks + copies
    }

    /// Positions behind the next token for which a decode may take blocks: those of drafts, and of the guesses behind them.
    fn max_positions_ahead(&self) -> usize {
        if self.guesses_on_device { 2 * self.max_drafts } else { self.max_drafts }
    }

    /// Upper bound of the bytes of [`crate::HostCopies`]. Every block that a plan allocates may have to be stored before, and every
    /// block of a table that joins may be loaded.
    fn max_host_copy_bytes(&self, num_table_blocks: usize, num_chunk_blocks: usize) -> usize {
        const COPY: usize = 2 * 5;
        // Of a row: a partial block when it joins, a copied one, and those that grow.
        let of_row = self.num_groups() * (3 + self.max_positions_ahead().div_ceil(self.block_size));
        // A row that joins takes a slot, one before drafts and a snapshot, and one that left in the same plan took a snapshot; one is
        // loaded.
        let states_of_row = if self.num_states > 0 { 5 } else { 0 };
        COPY * (self.max_rows * (of_row + states_of_row) + 2 * num_table_blocks + num_chunk_blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        BlockId, CopiedBlock, GrownTable, HostCopies, HostSlot, JoinedRow, JoinedTable, RevisedRow, RowId, RowWork,
        SamplingParams, SequenceId, StepPlan, TokenId,
    };

    #[test]
    fn the_largest_plan_fits_its_bound_and_wastes_little_of_it() {
        let config = EngineConfig {
            max_rows: 2,
            max_joined_tokens: 100,
            max_sequence_len: 50,
            max_drafts: 3,
            num_host_blocks: 100,
            ..EngineConfig::default()
        };
        let sampling = SamplingParams {
            top_k: u32::MAX,
            seed: u64::MAX,
            min_tokens: u32::MAX,
            num_logprobs: Some(u32::MAX),
            beam_candidates: u32::MAX,
            top_p_reset: Some(TokenId(u32::MAX)),
            logit_bias: vec![(TokenId(u32::MAX), 1.0); 50],
            ..SamplingParams::default()
        };
        let joined = JoinedRow {
            row: RowId(u32::MAX),
            sequence: SequenceId(u64::MAX),
            tokens: vec![TokenId(u32::MAX); 50],
            num_prompt_tokens: u32::MAX,
            num_computed: u32::MAX,
            tables: vec![JoinedTable { first: u32::MAX, blocks: vec![BlockId(u32::MAX); 4] }],
            state: None,
            adapter: None,
            sampling,
        };
        let work = RowWork {
            row: RowId(u32::MAX),
            start: u32::MAX,
            num_tokens: u32::MAX,
            samples: true,
            num_guesses: u32::MAX,
        };
        let tokens = vec![TokenId(u32::MAX); 4];
        let revised = RevisedRow { row: RowId(u32::MAX), parent: RowId(u32::MAX), num_kept: u32::MAX, tokens };
        let copied =
            CopiedBlock { row: RowId(u32::MAX), group: u32::MAX, from: BlockId(u32::MAX), to: BlockId(u32::MAX) };
        let grown = GrownTable { row: RowId(u32::MAX), group: u32::MAX, block: BlockId(u32::MAX) };
        let plan = StepPlan {
            step: u64::MAX,
            left: vec![RowId(u32::MAX); 2],
            adapters: vec![],
            joined: vec![joined],
            // Each row grows by one block and copies another, and a joined table has four blocks.
            host: HostCopies {
                stored: vec![(BlockId(u32::MAX), HostSlot(u32::MAX)); 8],
                loaded: vec![(BlockId(u32::MAX), HostSlot(u32::MAX)); 4],
                ..HostCopies::default()
            },
            revised: vec![revised; 2],
            copied: vec![copied; 2],
            copied_states: vec![],
            restored: vec![],
            saved_states: vec![],
            grown: vec![grown; 2],
            drafts: vec![(RowId(u32::MAX), vec![TokenId(u32::MAX); 3]); 2],
            runs_drafter: true,
            work: vec![work; 2],
        };
        let mut bytes = Vec::new();
        crate::plan::encode(&plan, &mut bytes);
        let bound = config.max_plan_bytes();
        assert!(bytes.len() <= bound && bytes.len() * 3 / 2 > bound, "{} bytes, bound {bound}", bytes.len());
    }
}
